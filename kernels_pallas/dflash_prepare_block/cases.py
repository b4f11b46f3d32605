"""Named shapes of `dflash_prepare_block`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kernels_pallas.resolve_future.cases import generator
from kernels_pallas.testing import array, token_dtype


class Case(NamedTuple):
    """A batch whose rows stand before, on and after page ends, some past their table."""

    name: str
    batch: int
    block_size: int = 16
    page_size: int = 64
    num_pages: int = 33  # of one row
    mask_token_id: int = 151_669


CASES = (
    Case("one row, plain decoding", 1, block_size=1),
    Case("smallest block", 3, block_size=2, page_size=1, num_pages=5),
    Case("odd sizes", 7, block_size=5, page_size=3, num_pages=4),
    Case("largest block", 9, block_size=64, page_size=16, num_pages=7),
    Case("one short page", 5, block_size=33, page_size=8, num_pages=1),
)

BENCH_CASES = tuple(Case(f"batch {batch}", batch) for batch in (1, 8, 32, 256))


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = generator(case.name)
    max_len = case.num_pages * case.page_size
    # Lengths at page ends and at the table's end; a negative one must stay harmless.
    lens = [1, case.page_size - 1, case.page_size, case.page_size + 1, 17, max_len, max_len - 2, -3]
    args = (
        array(rng.integers(0, case.mask_token_id, case.batch), token_dtype()),
        array(np.resize(lens, case.batch), jnp.int32),
        make_page_table(case, rng),
    )
    return args, static_of(case)


def static_of(case: Case) -> dict[str, Any]:
    """The static keywords that lay out a block."""
    return {
        "mask_token_id": case.mask_token_id,
        "block_size": case.block_size,
        "page_size": case.page_size,
    }


def make_page_table(case: Case, rng: np.random.Generator) -> Any:
    """i32[B, M] every page its own, in random order."""
    pages = 1 + rng.permutation(case.batch * case.num_pages)
    return array(pages.reshape(case.batch, case.num_pages), jnp.int32)
