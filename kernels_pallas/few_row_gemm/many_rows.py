"""Which launch serves a product of 128 to 512 rows, where one beats XLA's: NOTES.md has the sweep.

At so many rows a program waits for x, which each loads from L2 for itself, as much as for the
weight. What won on an H200 has all programs at once, one on each multiprocessor and few idle, and
cuts wide products in two; or, where kernels may load ahead, Mosaic's for all of a layer.
"""

from __future__ import annotations

import jax

from kernels_pallas import early_launch, limits
from kernels_pallas.few_row_gemm import mosaic_gpu, triton

_PROGRAMS = limits.MULTIPROCESSORS  # at once
_LEAST_FILL = 0.7
_MOST_COLUMNS = 8192  # of one program
_TILE_M = mosaic_gpu.TILE_M

# tile_n, stages, splits: in the order in which they are tried.
_TRITON = ((64, 6, 1), (64, 6, 2))
_MOSAIC = ((64, 8, 1), (96, 7, 1), (128, 6, 2))
_AHEAD = ((32, 8, 1), (48, 8, 1), (64, 8, 1), (128, 5, 4))


def loads_ahead(num_rows: int) -> bool:
    """Whether all products of so many rows are Mosaic's, which ask for weights ahead of x."""
    return num_rows == _TILE_M and jax.__version_info__ >= early_launch.AHEAD_MIN_JAX


def choose(
    num_rows: int, outputs: int, width: int, *, swiglu: bool, may_split: bool
) -> triton.Config | mosaic_gpu.Config | None:
    """The launch, or None where XLA's product is as fast or nothing was measured.

    outputs: of the result, with `swiglu` half the weight's rows.
    """
    if num_rows not in mosaic_gpu.ROWS:
        return None
    tiles_m = num_rows // _TILE_M
    if swiglu:
        config = mosaic_gpu.Config(96, 64, num_stages=5)
        if tiles_m > 2:
            config = mosaic_gpu.Config(128, 64, num_stages=4, loaders=1)
        programs = tiles_m * outputs // config.tile_n
        waves = -(-programs // _PROGRAMS)
        fits = outputs % config.tile_n == 0 and width % config.tile_k == 0
        return config if fits and programs >= _LEAST_FILL * waves * _PROGRAMS else None
    if tiles_m > 2:
        return None
    ahead = loads_ahead(num_rows)
    by_triton = tiles_m == 1 and not ahead
    for tile_n, stages, splits in _AHEAD if ahead else _TRITON if by_triton else _MOSAIC:
        programs = tiles_m * outputs // tile_n * splits
        if (
            outputs % tile_n == 0
            and width % (64 * splits) == 0
            and width // splits <= _MOST_COLUMNS
            and _LEAST_FILL * _PROGRAMS <= programs <= _PROGRAMS
            and (may_split or splits == 1)
        ):
            if by_triton:
                return triton.Config(tile_n, 64, 4, stages, weight_first=True, splits=splits)
            return mosaic_gpu.Config(tile_n, 64, stages, splits)
    return None
