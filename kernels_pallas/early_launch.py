"""Lets the kernel behind be launched while this one still runs, from Hopper on.

XLA begins every kernel of its own and of Pallas-Triton with `griddepcontrol.wait`, so that it reads
nothing before the kernels ahead have ended and their results are visible; but nothing lets it start
before then, and each launch costs its latency in full. A kernel that says `launch_dependents` does.
The one behind then only waits inside, already on the device.

It must be a Pallas-Triton kernel, or one that is not launched so (a library's): its loads keep
their place behind the wait. XLA marks what its own fusions read as never changing, and the compiler
may move such loads ahead of the wait. A kernel of Mosaic GPU has the wait where we put it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import dispatch

MIN_CAPABILITY = (9, 0)
AHEAD_MIN_JAX = (0, 12)  # Mosaic's kernels in a command buffer, launched early
# Of a layer, in turn; where one of them is XLA's, the one before it must not launch it early.
CHAIN = ("few_row_gemm", "kv_write", "paged_attention", "add_rms_norm")


def refuses(device: dispatch.Device) -> str | None:
    """Why no kernel on `device` can be launched early, or None."""
    return dispatch.refuses_below(device, MIN_CAPABILITY)


def refuses_ahead(device: dispatch.Device) -> str | None:
    """Why no kernel of Mosaic GPU on `device` can be launched early and load ahead, or None."""
    return dispatch.refuses_mosaic_gpu(device, AHEAD_MIN_JAX)


def program_id(axis: int, early_launch: bool) -> jax.Array:
    """`pl.program_id`; with `early_launch` the kernel behind may be launched from here on."""
    index = pl.program_id(axis)
    if not early_launch:
        return index
    # The dialect has inline assembly for arrays only, and drops it where nobody needs its result.
    (index,) = pltriton.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.broadcast_to(index, (1,))],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return index.reshape(())
