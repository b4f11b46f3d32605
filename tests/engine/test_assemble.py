"""What is refused or decided before an engine is built."""

import pytest

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine import assemble as assembling
from jaxspec.engine.assemble import assemble, refuse_old_gpu_jax
from jaxspec.weights.files import ModelFileError
from kernels_pallas.dispatch import UnsupportedKernel
from tests.tiny_model import write_tiny_model


def test_a_jax_that_miscompiles_on_gpus_is_refused_there():
    with pytest.raises(
        ConfigError,
        match=r"^jax 0\.10\.2 miscompiles nested concatenates on GPUs; install jax 0\.11\.1 or "
        r"later \(pip install -e '\.\[gpu\]' on Python 3\.12\)$",
    ):
        refuse_old_gpu_jax("gpu", (0, 10, 2))


@pytest.mark.parametrize(("platform", "version"), [("cpu", (0, 10, 2)), ("gpu", (0, 11, 1))])
def test_other_platforms_and_later_versions_pass(platform, version):
    assert refuse_old_gpu_jax(platform, version) is None


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"kernels": "foo"}, UnsupportedKernel, "'foo' is unknown; take one of auto, xla, triton"),
        ({"drafter": "./nowhere"}, ModelFileError, "./nowhere: no such drafter"),
        ({"max_model_len": 10**9}, ConfigError, "max_model_len is 1000000000, but the model's"),
    ],
)
def test_what_headers_refuse_costs_no_loading(settings, error, text, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(assembling, "load_target", lambda *args, **kwargs: loaded.append(args))
    config = EngineConfig(model=str(write_tiny_model(tmp_path)), **settings)
    with pytest.raises(error, match=text):
        assemble(config, cache_dir=tmp_path)
    assert not loaded
