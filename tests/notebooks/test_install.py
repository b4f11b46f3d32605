"""What the notebooks' first cell installs, by the driver it finds."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "notebooks" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("driver", "extras"),
    [
        (None, "train,notebooks"),
        ("525.60.13", "cuda12,train,notebooks"),
        ("579.99", "cuda12,train,notebooks"),
        ("580.65.06", "gpu,train,notebooks"),
    ],
)
def test_the_driver_decides_about_cuda(install, driver, extras):
    assert install.extras_for(driver) == extras


def test_a_driver_that_runs_no_cuda_12_is_refused(install):
    with pytest.raises(SystemExit, match=r"driver is 470.82, but CUDA 12 needs 525"):
        install.extras_for("470.82")


def test_the_driver_is_what_nvidia_smi_says(install, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.driver_version() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    smi.chmod(0o755)
    assert install.driver_version() == "580.65.06"
    smi.write_text("#!/bin/sh\necho it has failed\nexit 9\n")
    assert install.driver_version() is None


def test_nothing_is_installed_over_what_is_there(install, monkeypatch, capsys):
    monkeypatch.setattr(install.subprocess, "check_call", lambda command: pytest.fail(str(command)))
    install.main()
    assert capsys.readouterr().out == "jaxspec is installed already\n"


def test_the_checkout_is_installed_with_its_extras(install, monkeypatch):
    commands = []
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(install, "driver_version", lambda: "580.1")
    monkeypatch.setattr(install.subprocess, "check_call", commands.append)
    install.main()
    assert commands[0][1:] == ["-m", "pip", "install", "-q", f"{ROOT}[gpu,train,notebooks]"]
