"""One setting for all tests: strict dtypes and ranks, so that no promotion goes unseen."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Runs a test with 64-bit types off and on."""
    with jax.enable_x64(request.param):
        yield request.param
