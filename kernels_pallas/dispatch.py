"""Chooses, once at start, which implementation of each op runs, says why, and proves it there.

An op is a folder of this package. Its `__init__.py` holds the public function, of the folder's
name, and `BACKENDS`: backend name -> `refuses(device, shapes)`, best first. "xla", the plain
`jax.numpy` reference, is always there and comes last. Its `cases.py` holds `CASES` and
`make_inputs(case) -> (args, static)`, what the self-test, the tests and the bench run.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax

import kernels_pallas

AUTO = "auto"
XLA = "xla"
INTERPRET = "_interpret"  # "triton_interpret": the kernel run by JAX op by op, for tests on a CPU

# Triton itself: "only enabled for Ampere GPUs (compute capability 8.0) and up" (jax#26799).
TRITON_MIN_CAPABILITY = (8, 0)
# Mosaic GPU: TMA and WGMMA, "only Hopper and newer" (jax docs/pallas/gpu/reference.md).
MOSAIC_MIN_CAPABILITY = (9, 0)
MOSAIC_MIN_JAX = (0, 11)  # semaphores of one device, the interpreter

Shapes = Mapping[str, Any]  # the static sizes a backend may refuse: {"block_size": 16, ...}


class UnsupportedKernel(ValueError):
    """An implementation asked for by name that cannot run here, or runs wrongly here."""


class Device(NamedTuple):
    """What a backend must know of a device; a plain value, so that tests can make one up."""

    platform: str  # "gpu", "cpu", "tpu"
    kind: str  # "NVIDIA H200", "Tesla T4", "cpu"
    compute_capability: tuple[int, int] | None = None  # CUDA devices only

    @classmethod
    def current(cls) -> Device:
        """The first device JAX sees."""
        device = jax.devices()[0]
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        capability = (int(found[1]), int(found[2])) if found else None
        return cls(device.platform, device.device_kind, capability)


class Choice(NamedTuple):
    """The implementation of an op and, in one line, why it and not a better one."""

    name: str
    reason: str


def refuses_triton(device: Device) -> str | None:
    """Why no Pallas-Triton kernel runs on `device`, or None."""
    return refuses_below(device, TRITON_MIN_CAPABILITY)


def refuses_mosaic_gpu(device: Device, min_jax: tuple[int, ...] = MOSAIC_MIN_JAX) -> str | None:
    """Why no Pallas Mosaic GPU kernel of ours that needs `min_jax` runs on `device`, or None."""
    # The device first: no newer jax would help there.
    refusal = refuses_below(device, MOSAIC_MIN_CAPABILITY)
    if refusal is None and jax.__version_info__ < min_jax:
        return f"jax {jax.__version__} < {'.'.join(map(str, min_jax))}"
    return refusal


def refuses_below(device: Device, minimum: tuple[int, int]) -> str | None:
    """Why `device` has not at least this CUDA compute capability, or None."""
    if device.platform != "gpu":
        return f"platform {device.platform} is not a GPU"
    if device.compute_capability is None:
        return f"{device.kind} has no CUDA compute capability"
    if device.compute_capability < minimum:
        return f"compute capability {_dotted(device.compute_capability)} < {_dotted(minimum)}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def ops() -> tuple[str, ...]:
    """The names of all ops: the folders of this package."""
    return tuple(
        sorted(found.name for found in pkgutil.iter_modules(kernels_pallas.__path__) if found.ispkg)
    )


def op_module(op: str) -> ModuleType:
    """The package of an op.

    Raises:
      UnsupportedKernel: there is no such op.
    """
    if op not in ops():
        raise UnsupportedKernel(f"{op=} is no kernel op; take one of {', '.join(ops())}")
    return importlib.import_module(f"kernels_pallas.{op}")


def cases_module(op: str) -> ModuleType:
    """The `cases.py` of an op."""
    op_module(op)
    return importlib.import_module(f"kernels_pallas.{op}.cases")


def function(op: str) -> Callable[..., Any]:
    """The public function of an op."""
    return getattr(op_module(op), op)


def pick(op: str, *, requested: str = AUTO, device: Device | None = None, **shapes: Any) -> Choice:
    """Chooses the implementation of an op; called once, at start, never while tracing.

    Args:
      op: name of the op, its folder.
      requested: "auto", or an implementation that must be met. A name that ends in "_interpret"
        runs that backend's kernel in JAX's interpreter on any device: slow, for tests.
      device: where it will run, by default `Device.current()`.
      **shapes: the static sizes in use, as the op's backends name them.

    Raises:
      UnsupportedKernel: the op is unknown, or `requested` is unknown or refuses device or shapes.
    """
    device = Device.current() if device is None else device
    backends: Mapping[str, Callable[[Device, Shapes], str | None]] = op_module(op).BACKENDS
    if requested == XLA:
        return Choice(XLA, "asked for")
    if requested != AUTO:
        return _explicit(op, requested, device, shapes, backends)
    refusals = []
    for name, refuses in backends.items():
        refusal = refuses(device, shapes)
        if refusal is None:
            return Choice(name, "; ".join([f"runs on {device.kind}", *refusals]))
        refusals.append(f"not {name}, since {refusal}")
    return Choice(XLA, "; ".join(refusals) or "the only implementation")


def _explicit(op, requested, device, shapes, backends) -> Choice:
    name = requested.removesuffix(INTERPRET)
    if name not in backends:
        raise _unknown_implementation(op, requested, AUTO)
    if requested.endswith(INTERPRET):
        # The kernel's own limits still hold; the device's do not.
        stand_in = Device("gpu", "interpreter", MOSAIC_MIN_CAPABILITY)
        refusal = backends[name](stand_in, shapes)
    else:
        refusal = backends[name](device, shapes)
    if refusal is not None:
        raise UnsupportedKernel(
            f"{op}: implementation {requested!r} cannot run on {device.kind}, since {refusal}; "
            f"take 'auto' or '{XLA}'"
        )
    return Choice(requested, "asked for")


def parse(op: str, implementation: str) -> tuple[str, bool]:
    """Splits an implementation's name into its backend and whether it is interpreted.

    Raises:
      UnsupportedKernel: the op has no such implementation.
    """
    name = implementation.removesuffix(INTERPRET)
    if implementation == XLA or name in op_module(op).BACKENDS:
        return name, implementation != name
    raise _unknown_implementation(op, implementation)


def _unknown_implementation(op: str, implementation: str, *others: str) -> UnsupportedKernel:
    known = [*others, XLA]
    for name in op_module(op).BACKENDS:
        known += [name, name + INTERPRET]
    return UnsupportedKernel(f"{op}: {implementation=} is unknown; take one of {', '.join(known)}")


def self_test(op: str, implementation: str, case: Any = None) -> None:
    """Runs an implementation beside the reference on the current device.

    Args:
      op: name of the op.
      implementation: what `pick` chose. The reference itself passes at once.
      case: one of the op's cases, or one like them with the sizes in use; None: all of its cases.

    Raises:
      UnsupportedKernel: the results differ by more than the rule of `testing.compare` allows;
        names op, case and error.
    """
    from kernels_pallas import testing  # not needed by the ops themselves

    if implementation == XLA:
        return
    cases = cases_module(op)
    for each in cases.CASES if case is None else (case,):
        args, static = cases.make_inputs(each)
        mismatch = testing.compare(function(op), args, static, implementation)
        if mismatch is not None:
            raise UnsupportedKernel(
                f"{op}: implementation {implementation!r} differs from the reference on case "
                f"{each.name!r} on {Device.current().kind}: {mismatch}; take '{XLA}' and report it"
            )
