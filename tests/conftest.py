"""One setting for all tests: strict dtypes and ranks, so that no promotion goes unseen."""

import jax
import jax.experimental.compilation_cache.compilation_cache
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config, items):
    """Leaves nightly tests out unless `-m` names the mark."""
    if "nightly" in config.getoption("-m"):
        return
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes long; run with -m nightly"))


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Runs a test with 64-bit types off and on."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def jax_cache_settings():
    """No compilation cache at first, and afterwards what there was before."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
