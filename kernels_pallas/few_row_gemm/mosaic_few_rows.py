"""`few_row_gemm` of up to 16 rows in Pallas Mosaic GPU: loads begin before the kernel ahead ends.

A step is a chain of products, and between two of them the memory idles: the one behind may read
nothing before the one ahead has ended. But a weight is read by all and written by none. So each
program asks for as much of its weight as fits beside what still runs, and only then waits for x
(`griddepcontrol.wait`). A kernel of Pallas-Triton cannot: XLA begins it with that wait.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import early_launch, limits
from kernels_pallas.few_row_gemm import mosaic
from kernels_pallas.mosaic_tiles import swizzled, turns_of

TILE_N = 64  # weight rows of a tile: what the tensor cores take at once
_LEAST_ROWS = 8  # of x, likewise
_MULTIPROCESSORS = limits.MULTIPROCESSORS
_MOST_ROWS = 16  # with more Triton's kernel is as fast or faster, but for qkv at 64
_LEAST_OUTPUTS = 2560  # fewer are too little work for whole tiles
_LEAST_FILL = 0.7  # of the places for programs


class Config(NamedTuple):
    """Static choices of a launch."""

    tile_k: int  # columns of one step
    num_stages: int  # steps whose weights are under way at once
    x_stages: int  # likewise of x, which is in L2
    splits: int = 1  # programs that share the columns; the result is then in as many parts
    per_sm: int = 1  # programs on a multiprocessor at once


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
    outputs = weight.shape[0] // (2 if swiglu else 1)
    assert outputs % TILE_N == 0 and x.shape[1] % (config.tile_k * config.splits) == 0
    work = outputs // TILE_N * config.splits
    turns = -(-work // (_MULTIPROCESSORS * config.per_sm))
    return mosaic.launch(
        _kernel,
        x,
        weight,
        swiglu=swiglu,
        splits=config.splits,
        programs=-(-work // turns),
        num_groups=3,
        interpret=interpret,
        config=config,
        early_launch=early_launch,
        is_interpreted=interpret,
    )


def _kernel(x_gmem, weight_gmem, out_gmem, *, config, halves, early_launch, is_interpreted):
    """One group of threads multiplies, one loads x and one the weight.

    The tensor cores take weight rows as theirs, so a tile's result stands with its rows as columns,
    and is turned on its way out.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile_k, dtype, out_dtype = config.tile_k, x_gmem.dtype, out_gmem.dtype
    num_rows, width = x_gmem.shape[0], x_gmem.shape[1] // config.splits
    tile_m = -(-num_rows // _LEAST_ROWS) * _LEAST_ROWS  # the copy engine fills in zeros
    steps = width // tile_k
    num_stages, x_stages = min(config.num_stages, steps), min(config.x_stages, steps)
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    tiles_n = out_gmem.shape[2] // TILE_N
    turns = turns_of(tiles_n * config.splits)
    zero = program * np.int32(0)  # a start that is not known: the rows may end before the tile

    def place(turn):
        """(split, first output) of a program's turn."""
        index = program + turn * np.int32(programs)
        return lax.div(index, np.int32(tiles_n)), lax.rem(index, np.int32(tiles_n)) * TILE_N

    def run(x_smem, weight_smem, out_smem, x_loaded, weight_loaded, x_free, weight_free):
        all_steps = turns * np.int32(steps)

        def load(source_of, smem, loaded, free):
            """Keeps all stages of `smem` filled, and ends when the last one has been read."""
            stages = smem.shape[0]

            def load_step(step, _):
                slot = lax.rem(step, np.int32(stages))
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                split, output = place(lax.div(step, np.int32(steps)))
                at = split * np.int32(width) + lax.rem(step, np.int32(steps)) * np.int32(tile_k)
                source = source_of(output, pl.ds(at, tile_k))
                plgpu.copy_gmem_to_smem(source, smem.at[slot], loaded.at[slot])

            def wait(step, _):
                plgpu.barrier_wait(free.at[lax.rem(step, np.int32(stages))])

            lax.fori_loop(np.int32(0), all_steps, load_step, None)
            lax.fori_loop(all_steps - np.int32(stages), all_steps, wait, None)

        def load_weight():
            def tile(output, columns):
                return weight_gmem.at[:, pl.ds(output, TILE_N), columns]

            load(tile, weight_smem, weight_loaded, weight_free)

        def load_x():
            def tile(_, columns):
                return x_gmem.at[pl.ds(zero, tile_m), columns]

            if not is_interpreted:
                plgpu.griddepcontrol_wait()
            load(tile, x_smem, x_loaded, x_free)

        def multiply():
            def multiply_tile(turn, _):
                split, output = place(turn)
                before = turn * np.int32(steps)

                def give_back(step):
                    plgpu.barrier_arrive(weight_free.at[lax.rem(step, np.int32(num_stages))])
                    plgpu.barrier_arrive(x_free.at[lax.rem(step, np.int32(x_stages))])

                def run_tile(accs):
                    def step(k, _):
                        slot = lax.rem(before + k, np.int32(num_stages))
                        x_slot = lax.rem(before + k, np.int32(x_stages))
                        plgpu.barrier_wait(weight_loaded.at[slot])
                        plgpu.barrier_wait(x_loaded.at[x_slot])
                        x = x_smem.at[x_slot].transpose((1, 0))
                        for half, acc in enumerate(accs):
                            plgpu.wgmma(acc, weight_smem.at[slot, half], x)
                        plgpu.wgmma_wait(halves)  # of the step before: its stages are free
                        pl.when(k > 0)(lambda: give_back(before + k - np.int32(1)))

                    lax.fori_loop(np.int32(0), np.int32(steps), step, None)
                    plgpu.wgmma_wait(0)
                    give_back(before + np.int32(steps - 1))
                    out, *up = (acc[...] for acc in accs)
                    if up:
                        out = mosaic.swiglu(out, up[0])
                    store(out, split, output)

                acc = plgpu.ACC((TILE_N, tile_m), jnp.float32)
                pl.run_scoped(run_tile, (acc,) * halves)

            lax.fori_loop(np.int32(0), turns, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0)

        def store(out, split, output):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out = plgpu.layout_cast(out.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            out_smem.transpose((1, 0))[...] = out
            plgpu.commit_smem()
            rows, at = pl.ds(zero, tile_m), pl.ds(output, TILE_N)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[split, rows, at])

        if early_launch:
            plgpu.griddepcontrol_launch_dependents()
        group = lax.axis_index("group")
        lax.cond(group == 0, multiply, lambda: lax.cond(group == 1, load_x, load_weight))

    def tiles(stages, *shape):
        return plgpu.SMEM((stages, *shape), dtype, transforms=swizzled(tile_k, dtype))

    pl.run_scoped(
        run,
        tiles(x_stages, tile_m, tile_k),
        tiles(num_stages, halves, TILE_N, tile_k),
        plgpu.SMEM((tile_m, TILE_N), out_dtype),
        plgpu.Barrier(num_barriers=x_stages),
        plgpu.Barrier(num_barriers=num_stages),
        plgpu.Barrier(num_barriers=x_stages),
        plgpu.Barrier(num_barriers=num_stages),
        collective_axes="group",
    )


def choose(
    num_rows: int, outputs: int, width: int, *, swiglu: bool, bits: int, may_split: bool
) -> Config | None:
    """The launch of a product, or None where Triton's kernel is to serve it; NOTES.md has sweeps.

    outputs: of the result, with `swiglu` half the weight's rows. may_split: whether its parts may
    be left to `add_rms_norm`.
    """
    if jax.__version_info__ < early_launch.AHEAD_MIN_JAX or bits != 16 or num_rows > _MOST_ROWS:
        return None
    if outputs < _LEAST_OUTPUTS or outputs % TILE_N:
        return None
    tiles = outputs // TILE_N
    splits = 2 if may_split and tiles <= _MULTIPROCESSORS // 2 else 1
    # Shared memory with 16 rows: 110 KiB where two programs are to fit, else 190.
    if swiglu:  # two programs side by side, since one has too few tiles to be even
        config = Config(128, 3, 3, per_sm=2)
    elif splits == 1 or width > 2 * outputs:
        config = Config(256, 5, 3, splits)
    else:  # behind attention: asks for its weight while that one runs, in what it leaves
        config = Config(128, 6, 3, splits)
    places = _MULTIPROCESSORS * config.per_sm
    work = tiles * config.splits
    if work < _LEAST_FILL * -(-work // places) * places or width % (config.tile_k * config.splits):
        return None
    return config
