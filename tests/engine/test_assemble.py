"""What is refused or decided before an engine is built."""

import pytest

from jaxspec.config import ConfigError
from jaxspec.engine.assemble import refuse_old_gpu_jax


def test_a_jax_that_miscompiles_on_gpus_is_refused_there():
    with pytest.raises(
        ConfigError,
        match=r"^jax 0\.10\.2 miscompiles nested concatenates on GPUs; install jax 0\.11\.1 or "
        r"later \(pip install 'jaxspec\[gpu\]' on Python 3\.12\)$",
    ):
        refuse_old_gpu_jax("gpu", (0, 10, 2))


@pytest.mark.parametrize(("platform", "version"), [("cpu", (0, 10, 2)), ("gpu", (0, 11, 1))])
def test_other_platforms_and_later_versions_pass(platform, version):
    assert refuse_old_gpu_jax(platform, version) is None
