"""Programs of training are large and run a few times, so compiling them fast matters most."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """Leaves out most optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
