"""A disk without room: compiled programs are not kept, and the engine serves all the same."""

import contextlib
import resource
import signal
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.engine.auto import StepTimes, remembered_times


@contextlib.contextmanager
def full_disk():
    """No file may grow: each write fails as on a full disk, with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_the_disk_of_these_tests_is_full(tmp_path):
    with full_disk(), pytest.raises(OSError, match="File too large"):
        (tmp_path / "file").write_bytes(b"x")


def test_programs_that_cannot_be_kept_run_all_the_same(jax_cache_settings, tmp_path):
    use_compilation_cache(tmp_path)
    with warnings.catch_warnings(record=True) as seen, full_disk():
        warnings.simplefilter("always")
        result = jax.jit(lambda x: x * 5 + 2)(jnp.arange(11, dtype=jnp.float32))
        assert result.tolist() == [x * 5 + 2 for x in range(11)]
    assert any("compilation cache" in str(warning.message) for warning in seen)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_step_times_that_cannot_be_kept_are_measured_again(tmp_path):
    file, measured = tmp_path / "auto.json", []

    def measure():
        measured.append(None)
        return StepTimes(1.0, 2.0)

    with full_disk():
        assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)
        assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)
    assert len(measured) == 2
    assert remembered_times(file, "key", measure) == StepTimes(1.0, 2.0)
