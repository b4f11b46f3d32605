"""`few_row_gemm` of 128 rows in Pallas Mosaic GPU: on Hopper, where TMA feeds the tensor cores.

At so many rows what limits is no longer the memory but how often x passes from L2 to each
multiprocessor: tiles are wide, and the programs of a cluster fetch x once for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import dispatch
from kernels_pallas.few_row_gemm.triton import add_up

NUM_ROWS = 128
_GROUP_ROWS = 64  # rows of x that a warp group multiplies


class Config(NamedTuple):
    """Static choices of a launch."""

    tile_n: int  # outputs of one program, a multiple of 32; with swiglu gate and up of each
    tile_k: int  # columns of one step
    num_stages: int
    cluster: int  # programs that share the loads of x, 1 or 2
    splits: int = 1  # programs that share the columns; above one a second launch adds up


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None; it knows num_rows."""
    if shapes.get("num_rows", NUM_ROWS) != NUM_ROWS:
        return f"num_rows={shapes['num_rows']} is not {NUM_ROWS}"
    return dispatch.refuses_mosaic_gpu(device)


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    *,
    swiglu: bool,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """See `few_row_gemm`. Grid: (clusters of tiles of outputs, splits)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, width = x.shape
    parts = 2 if swiglu else 1
    outputs = weight.shape[0] // parts
    split = config.splits > 1
    assert num_rows == NUM_ROWS and not (split and swiglu)
    assert outputs % (config.tile_n * config.cluster) == 0
    assert width % (config.tile_k * config.splits) == 0
    dtype = jnp.float32 if split else x.dtype
    shape = (config.splits, num_rows, outputs)
    inputs = (x, weight.reshape(parts, outputs, width))
    if residual is not None and not split:
        inputs += (residual,)
    result = plgpu.kernel(
        functools.partial(_kernel, config=config, parts=parts),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(outputs // (config.tile_n * config.cluster), config.splits),
        grid_names=("tile", "split"),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="group",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*inputs)
    if not split:
        return result.reshape(num_rows, outputs)
    return add_up(result, residual, x.dtype, early_launch=False, interpret=interpret)


def _kernel(x_gmem, weight_gmem, *refs, config, parts):
    """x [M, E], weight [parts, out, E], maybe the residual [M, out], the result [splits, M, out].

    Two warp groups multiply 64 rows of x each, a third one loads.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    residual_gmem, out_gmem = (refs[0] if len(refs) > 1 else None), refs[-1]
    tile_n, tile_k = config.tile_n, config.tile_k
    out_tile = 64 if tile_n % 64 == 0 else 32  # columns that leave at once
    width = x_gmem.shape[1] // config.splits
    group, split = lax.axis_index("group"), lax.axis_index("split")
    tile = lax.axis_index("tile") * config.cluster + lax.axis_index("cluster")
    outputs, columns = pl.ds(tile * tile_n, tile_n), pl.ds(split * width, width)

    def transforms(elements, dtype):
        bits = jnp.finfo(dtype).bits
        swizzle = plgpu.find_swizzle(elements * bits)
        return (
            plgpu.TilingTransform((8, 8 * swizzle // bits)),
            plgpu.SwizzleTransform(swizzle),
        )

    def tiles(rows, shared):
        return plgpu.BlockSpec(
            (rows, tile_k),
            lambda k: (0, k),
            transforms=transforms(tile_k, x_gmem.dtype),
            memory_space=plgpu.SMEM,
            delay_release=1,
            collective_axes=("cluster",) if shared and config.cluster > 1 else (),
        )

    def multiply(_, x_smem, *rest):
        *weights_smem, accs = rest
        rows = x_smem.at[pl.ds(group * _GROUP_ROWS, _GROUP_ROWS)]
        for weight_smem, acc in zip(weights_smem, accs, strict=True):
            plgpu.wgmma(acc, rows, weight_smem.transpose((1, 0)))
        plgpu.wgmma_wait(parts)  # of the step before: its tiles are free
        return accs

    def run(allocations, out_smem, barrier):
        def around(multiply_all):
            @functools.partial(
                pl.run_scoped,
                accs=tuple(plgpu.ACC((_GROUP_ROWS, tile_n), jnp.float32) for _ in range(parts)),
            )
            def _(accs):
                multiply_all(accs)
                out, *up = (acc[...] for acc in accs)
                if up:
                    out = out / (1.0 + jnp.exp(-out)) * up[0]
                store(out, out_smem.at[group], barrier)

        pipeline(multiply, around)(*operands, allocations=allocations)

    def store(out, smem, barrier):
        for first in range(0, tile_n, out_tile):
            rows = pl.ds(group * _GROUP_ROWS, _GROUP_ROWS)
            at = pl.ds(tile * tile_n + first, out_tile)
            part = out[:, first : first + out_tile]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if residual_gmem is not None:
                own = barrier.at[group]
                plgpu.copy_gmem_to_smem(residual_gmem.at[rows, at], smem, own)
                plgpu.barrier_wait(own)
                part = part + smem[...].astype(jnp.float32)
            smem[...] = part.astype(out_gmem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, out_gmem.at[split, rows, at])
        plgpu.wait_smem_to_gmem(0)

    def pipeline(body, around):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(width // tile_k,),
            memory_registers=40,
            in_specs=[tiles(NUM_ROWS, True), *[tiles(tile_n, False)] * parts],
            wg_axis="group",
            num_compute_wgs=2,
            max_concurrent_steps=config.num_stages,
            compute_context=around,
        )

    weights = [weight_gmem.at[part, outputs, columns] for part in range(parts)]
    operands = (x_gmem.at[:, columns], *weights)
    nothing = lambda *_: None  # noqa: E731
    pl.run_scoped(
        run,
        pipeline(nothing, nothing).get_allocations(*operands),
        plgpu.SMEM(
            (2, _GROUP_ROWS, out_tile),
            out_gmem.dtype,
            transforms=transforms(out_tile, out_gmem.dtype),
        ),
        plgpu.Barrier(num_barriers=2),
        collective_axes="group",
    )
