"""A matrix product of few rows that streams the weight once, with what follows it.

Read `reference.py`, then `triton.py`; `mosaic_few_rows.py` for large weights, since jax 0.12; and
`many_rows.py` and `mosaic_gpu.py` for 128 to 512 rows. Tests and `bench.py` share the shapes of
`cases.py`.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.few_row_gemm import many_rows, mosaic_few_rows, mosaic_gpu, reference, triton
from kernels_pallas.few_row_gemm.triton import MAX_ROWS

__all__ = ["MAX_ROWS", "few_row_gemm", "launches_early", "loads_ahead", "parts_for"]

# Under Mosaic's name Triton's kernel runs, too, where it is the faster one: see `many_rows.py`.
BACKENDS = {"mosaic_gpu": mosaic_gpu.refuses, "triton": triton.refuses}


def parts_for(
    num_rows: int,
    outputs: int,
    width: int,
    *,
    swiglu: bool = False,
    may_split: bool = False,
    implementation: str,
) -> int:
    """In how many parts of the columns an implementation makes a product best; 0: leave it to XLA.

    outputs: of the result, with `swiglu` half the weight's rows. may_split: whether above 1 helps.
    """
    if implementation == dispatch.XLA:
        return 0
    config = None
    if implementation.startswith("mosaic_gpu"):
        config = _config(num_rows, outputs, width, swiglu=swiglu, may_split=may_split)
    if config is None:
        return 1 if num_rows <= MAX_ROWS else 0
    return config.splits


def launches_early(
    num_rows: int,
    outputs: int,
    width: int,
    *,
    swiglu: bool = False,
    may_split: bool = False,
    attends_ahead: bool = False,
    implementation: str,
) -> bool:
    """Whether such a product may be launched early, and launch early what is behind it.

    XLA's may not; one of many rows only where all of a layer load ahead, its attention too, since
    else a whole step took longer (NOTES.md).

    attends_ahead: whether attention does. The other arguments are those of `parts_for`.
    """
    how = {"swiglu": swiglu, "may_split": may_split, "implementation": implementation}
    may = num_rows <= MAX_ROWS or (attends_ahead and many_rows.loads_ahead(num_rows))
    return may and parts_for(num_rows, outputs, width, **how) > 0


def loads_ahead(outputs: int, width: int, *, implementation: str) -> bool:
    """Whether a layer with such a gate and up has products of `mosaic_few_rows`, in 16 bits."""
    is_mosaic = implementation.startswith("mosaic_gpu")
    return is_mosaic and _config(1, outputs, width, swiglu=True, may_split=False) is not None


def _config(
    num_rows: int, outputs: int, width: int, *, swiglu: bool, may_split: bool, bits: int = 16
) -> mosaic_few_rows.Config | mosaic_gpu.Config | triton.Config | None:
    """The launch that Mosaic's name stands for; None: Triton's own, above MAX_ROWS rows XLA's."""
    how = {"swiglu": swiglu, "may_split": may_split}
    if num_rows > MAX_ROWS:
        return many_rows.choose(num_rows, outputs, width, **how)
    return mosaic_few_rows.choose(num_rows, outputs, width, bits=bits, **how)


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    *,
    swiglu: bool = False,
    num_parts: int = 1,
    early_launch: bool = False,
    implementation: str = "xla",
) -> jax.Array:
    """Returns epilogue(x @ weight.T), accumulated in f32 and rounded once.

    The epilogue is, with `swiglu`, silu(gate) * up of the product's two halves, then the sum with
    `residual`.

    Args:
      x: [M, E] few rows: decode and verify of a batch; see `parts_for`.
      weight: [out, E], or with `swiglu` [2 out, E], the gate's rows first.
      residual: [M, out] added to the result, or None.
      swiglu: whether the two halves of the product are gate and up.
      num_parts: above 1 the columns are cut in so many parts, whose products are not summed:
        `add_rms_norm` does. Then there is no epilogue.
      early_launch: see `kernels_pallas.early_launch`.
      implementation: "xla", "triton", "mosaic_gpu", or what `dispatch.pick` chose.

    Returns:
      [M, out] in x's dtype, or with parts f32[num_parts, M, out].
    """
    num_rows, width = x.shape
    chex.assert_shape(weight, (None, width))
    halves = 2 if swiglu else 1
    outputs = weight.shape[0] // halves
    chex.assert_is_divisible(weight.shape[0], halves)
    chex.assert_type(weight, x.dtype)
    if residual is not None:
        chex.assert_shape(residual, (num_rows, outputs))
        chex.assert_type(residual, x.dtype)
    if num_parts > 1:
        chex.assert_is_divisible(width, num_parts)
        assert residual is None and not swiglu, "parts have no epilogue"
    by, interpret = dispatch.parse("few_row_gemm", implementation)
    if by == dispatch.XLA:
        return reference.few_row_gemm(x, weight, residual, swiglu=swiglu, num_parts=num_parts)
    config, early_launch = None, early_launch and not interpret
    if by == "mosaic_gpu" and residual is None:
        how = {"swiglu": swiglu, "may_split": num_parts > 1}
        config = _config(num_rows, outputs, width, bits=jnp.finfo(x.dtype).bits, **how)
    if isinstance(config, mosaic_few_rows.Config | mosaic_gpu.Config):
        chex.assert_equal(config.splits, num_parts)
        is_few = isinstance(config, mosaic_few_rows.Config)
        run = mosaic_few_rows.few_row_gemm if is_few else mosaic_gpu.few_row_gemm
        return run(
            x, weight, swiglu=swiglu, config=config, early_launch=early_launch, interpret=interpret
        )
    return triton.few_row_gemm(
        x,
        weight,
        residual,
        swiglu=swiglu,
        num_parts=num_parts,
        early_launch=early_launch,
        interpret=interpret,
        config=config,
    )
