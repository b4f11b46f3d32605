"""What this machine is, and what runs each kernel here: `python -m kernels_pallas`."""

from __future__ import annotations

import jax

from kernels_pallas import dispatch
from kernels_pallas.measure import table


def overview() -> str:
    """Device and versions in a line, then a line for each op: its implementation, and why."""
    device = dispatch.Device.current()
    capability = ".".join(str(part) for part in device.compute_capability or ())
    facts = [device.kind, f"jax {jax.__version__}"]
    if capability:
        facts.insert(1, f"compute capability {capability}")
    rows = [{"op": op, **dispatch.pick(op)._asdict()} for op in dispatch.ops()]
    return "\n".join([", ".join(facts), "", table(rows)])
