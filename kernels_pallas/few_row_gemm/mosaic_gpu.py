"""`few_row_gemm` of whole tiles of 128 rows in Pallas Mosaic GPU: TMA feeds the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import dispatch, limits
from kernels_pallas.few_row_gemm import mosaic, triton
from kernels_pallas.mosaic_tiles import swizzled, turns_of

TILE_M = 128
_GROUPS = 2  # warp groups that multiply; others load
_GROUP_ROWS = TILE_M // _GROUPS
_PROGRAMS = limits.MULTIPROCESSORS  # one on each
ROWS = (TILE_M, 2 * TILE_M, 4 * TILE_M)  # what was measured


class Config(NamedTuple):
    """Static choices of a launch."""

    tile_n: int  # outputs of one program, a multiple of 32; with swiglu gate and up of each
    tile_k: int  # columns of one step
    num_stages: int  # steps whose loads are under way at once
    splits: int = 1  # programs that share the columns; the result is then in as many parts
    # Warp groups that load. With two, one loads the weight ahead of the kernel ahead's end; one
    # leaves those that multiply 232 registers a thread, which 128 x 256 sums need.
    loaders: int = 2


def refuses(device: dispatch.Device, shapes: Mapping[str, Any]) -> str | None:
    """Why this kernel cannot run on `device` with these shapes, or None.

    Of `shapes` it knows num_rows, which Triton's takes where they are few.
    """
    num_rows = shapes.get("num_rows", 1)
    if num_rows > triton.MAX_ROWS and num_rows not in ROWS:
        return f"num_rows={num_rows} is none of {', '.join(map(str, ROWS))}"
    return dispatch.refuses_mosaic_gpu(device)


def few_row_gemm(
    x: jax.Array,
    weight: jax.Array,
    *,
    swiglu: bool,
    config: Config,
    early_launch: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies as `few_row_gemm` does. Grid: programs that take tile after tile.

    Returns:
      [M, out] in x's dtype, or with splits f32[splits, M, out], whose sum it is.
    """
    num_rows, width = x.shape
    outputs = weight.shape[0] // (2 if swiglu else 1)
    assert num_rows % TILE_M == 0 and outputs % config.tile_n == 0
    assert width % (config.tile_k * config.splits) == 0
    work = num_rows // TILE_M * (outputs // config.tile_n) * config.splits
    return mosaic.launch(
        _kernel,
        x,
        weight,
        swiglu=swiglu,
        splits=config.splits,
        programs=min(work, _PROGRAMS),
        num_groups=_GROUPS + config.loaders,
        interpret=interpret,
        config=config,
        early_launch=early_launch,
        is_interpreted=interpret,
    )


def _kernel(x_gmem, weight_gmem, out_gmem, *, config, halves, early_launch, is_interpreted):
    """Two warp groups multiply 64 rows of x each; one loads x and one the weight, or one both.

    Only x waits for the kernel ahead, which made it; no kernel writes a weight.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile_n, tile_k = config.tile_n, config.tile_k
    dtype, out_dtype = x_gmem.dtype, out_gmem.dtype
    out_tile = math.gcd(tile_n, 32)  # columns that leave at once
    width = x_gmem.shape[1] // config.splits
    steps = width // tile_k
    num_stages = min(config.num_stages, steps)
    group, program = lax.axis_index("group"), lax.axis_index("program")
    programs = lax.axis_size("program")
    tiles_m, tiles_n = x_gmem.shape[0] // TILE_M, out_gmem.shape[2] // tile_n
    turns = turns_of(tiles_m * tiles_n * config.splits)

    def place(turn):
        """(split, first row, first output) of a program's turn; rows change first."""
        index = program + turn * np.int32(programs)
        m, index = lax.rem(index, np.int32(tiles_m)), lax.div(index, np.int32(tiles_m))
        n, split = lax.rem(index, np.int32(tiles_n)), lax.div(index, np.int32(tiles_n))
        return split, m * np.int32(TILE_M), n * np.int32(tile_n)

    def slot_of(step):
        return lax.rem(step, np.int32(num_stages))

    def run(x_smem, weight_smem, out_smem, loaded, consumed):
        def load(*operands):
            plgpu.set_max_registers(40, action="decrease")

            def load_tile(turn, done):
                split, row, output = place(turn)

                def load_step(k, done):
                    slot = slot_of(done)

                    @pl.when(done >= num_stages)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                    at = split * np.int32(width) + k * np.int32(tile_k)
                    for source_of, smem in operands:
                        source = source_of(row, output, pl.ds(at, tile_k))
                        plgpu.copy_gmem_to_smem(source, smem.at[slot], loaded.at[slot])
                    return done + np.int32(1)

                return lax.fori_loop(np.int32(0), np.int32(steps), load_step, done)

            done = lax.fori_loop(np.int32(0), turns, load_tile, np.int32(0))

            def wait(behind, _):  # until what was loaded is read
                plgpu.barrier_wait(consumed.at[slot_of(done - num_stages + behind)])

            lax.fori_loop(np.int32(0), np.int32(num_stages), wait, None)

        all_x = (lambda row, _, columns: x_gmem.at[pl.ds(row, TILE_M), columns], x_smem)
        all_weight = (
            lambda _, output, columns: weight_gmem.at[:, pl.ds(output, tile_n), columns],
            weight_smem,
        )

        def load_x(*others):
            if not is_interpreted:
                plgpu.griddepcontrol_wait()
            load(all_x, *others)

        def load_all():
            if config.loaders == 1:
                load_x(all_weight)
            else:
                lax.cond(group == _GROUPS, load_x, lambda: load(all_weight))

        def multiply():
            plgpu.set_max_registers(216 if config.loaders == 2 else 232, action="increase")
            own_rows = pl.ds(group * _GROUP_ROWS, _GROUP_ROWS)

            def multiply_tile(turn, _):
                split, row, output = place(turn)
                before = turn * np.int32(steps)

                def run_tile(accs):
                    def step(k, accs):
                        slot = slot_of(before + k)
                        plgpu.barrier_wait(loaded.at[slot])
                        x = x_smem.at[slot].at[own_rows]
                        for part, acc in enumerate(accs):
                            plgpu.wgmma(acc, x, weight_smem.at[slot, part].transpose((1, 0)))
                        plgpu.wgmma_wait(halves)  # of the step before: its tiles are free

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(consumed.at[slot_of(before + k - np.int32(1))])

                        return accs

                    lax.fori_loop(np.int32(0), np.int32(steps), step, accs)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[slot_of(before + np.int32(steps - 1))])
                    out, *up = (acc[...] for acc in accs)
                    if up:
                        out = mosaic.swiglu(out, up[0])
                    store(out, split, row, output)

                acc = plgpu.ACC((_GROUP_ROWS, tile_n), jnp.float32)
                pl.run_scoped(run_tile, (acc,) * halves)

            lax.fori_loop(np.int32(0), turns, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0)

        def store(out, split, row, output):
            for index, first in enumerate(range(0, tile_n, out_tile)):
                smem = out_smem.at[group, index % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                smem[...] = out[:, first : first + out_tile].astype(out_dtype)
                plgpu.commit_smem()
                rows = pl.ds(row + group * _GROUP_ROWS, _GROUP_ROWS)
                at = pl.ds(output + np.int32(first), out_tile)
                plgpu.copy_smem_to_gmem(smem, out_gmem.at[split, rows, at])

        if early_launch:
            plgpu.griddepcontrol_launch_dependents()
        lax.cond(group < _GROUPS, multiply, load_all)

    def stages(*shape):
        return plgpu.SMEM((num_stages, *shape), dtype, transforms=swizzled(tile_k, dtype))

    pl.run_scoped(
        run,
        stages(TILE_M, tile_k),
        stages(halves, tile_n, tile_k),
        plgpu.SMEM(
            (_GROUPS, 2, _GROUP_ROWS, out_tile),
            out_dtype,
            transforms=swizzled(out_tile, out_dtype),
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=num_stages),
        collective_axes="group",
    )
