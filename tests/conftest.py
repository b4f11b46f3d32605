"""Settings of all tests: strict types, so that no promotion goes unseen, and quick compiling."""

import importlib.metadata
import os
import sys
import tempfile

# Compiling is nearly all of the time, and most of it is LLVM's, which tests of small sizes do not
# repay. XLA's own passes stay. `XLA_FLAGS= pytest` tests what users run; GPUs are tested so always.
if "gpu" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # The emitters by way of MLIR take twice as long to compile. Later versions have no others.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        quick += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", quick)

import jax
import jax.experimental.compilation_cache.compilation_cache
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_configure(config):
    """Keeps a run's programs in one folder, so that no two tests or workers compile the same."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="jaxspec-programs-")
        config.add_cleanup(folder.cleanup)
        os.environ["JAXSPEC_TEST_PROGRAMS"] = folder.name
    jax.config.update("jax_compilation_cache_dir", os.environ["JAXSPEC_TEST_PROGRAMS"])


def pytest_collection_modifyitems(config, items):
    """Leaves slow and nightly tests out unless `-m` names their mark."""
    for mark in ("slow", "nightly"):
        if mark in config.getoption("-m"):
            continue
        for item in items:
            if mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"takes long; run with -m {mark}"))


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
