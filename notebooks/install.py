"""Installs the checkout that this file lies in, for the GPU driver it finds."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

CUDA13_DRIVER, CUDA12_DRIVER = 580, 525  # the oldest drivers that run them
EXTRAS = "train,notebooks"


def main() -> None:
    """Does nothing where jaxspec can be imported already."""
    if importlib.util.find_spec("jaxspec") is not None:
        print("jaxspec is installed already")
        return
    extras = extras_for(driver_version())
    checkout = Path(__file__).resolve().parents[1]
    print(f"installing {checkout.name}[{extras}]")
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", f"{checkout}[{extras}]"])


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True)
    return asked.stdout.split()[0] if asked.returncode == 0 and asked.stdout.strip() else None


def extras_for(driver: str | None) -> str:
    """What to install with jaxspec: JAX for the newest CUDA that the driver runs.

    Raises:
        SystemExit: the driver is too old for any.
    """
    if driver is None:
        return EXTRAS
    major = int(driver.partition(".")[0])
    if major >= CUDA13_DRIVER:
        return f"gpu,{EXTRAS}"
    if major >= CUDA12_DRIVER:
        return f"cuda12,{EXTRAS}"
    raise SystemExit(
        f"the NVIDIA driver is {driver}, but CUDA 12 needs {CUDA12_DRIVER} or later; update it"
    )


if __name__ == "__main__":
    main()
