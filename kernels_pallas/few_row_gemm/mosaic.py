"""What the two products in Pallas Mosaic GPU share: how they are launched, and SwiGLU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def launch(
    kernel: Any,
    x: jax.Array,
    weight: jax.Array,
    *,
    swiglu: bool,
    splits: int,
    programs: int,
    num_groups: int,
    interpret: bool,
    **static: Any,
) -> jax.Array:
    """Runs a kernel on x [M, E], weight [halves, out, E] and its result [splits, M, out].

    programs: in the grid. num_groups: of 128 threads each, in a program. static: of the kernel.

    Returns:
      [M, out] in x's dtype, or with splits f32[splits, M, out], whose sum it is.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, width = x.shape
    halves = 2 if swiglu else 1
    outputs = weight.shape[0] // halves
    assert not (swiglu and splits > 1), "the halves of a split product are not whole"
    run = functools.partial(kernel, halves=halves, **static)
    run.__name__ = "few_row_gemm"
    dtype = x.dtype if splits == 1 else jnp.float32
    result = plgpu.kernel(
        run,
        out_type=jax.ShapeDtypeStruct((splits, num_rows, outputs), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=num_groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, weight.reshape(halves, outputs, width))
    return result[0] if splits == 1 else result


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up in f32, in a third of the instructions of a quotient; off by some 2**-21."""
    factor = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * factor * factor * up
