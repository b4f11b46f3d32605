"""Named shapes of `resolve_prepare`, for its tests, its bench and the self-test at start."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels_pallas.dflash_prepare_block import cases as prepare_cases
from kernels_pallas.resolve_future import cases as resolve_cases


class Case(NamedTuple):
    """A relay and the block laid out from it."""

    name: str
    resolve: resolve_cases.Case
    prepare: prepare_cases.Case


def make_case(
    name: str, batch: int, carry=(), poison: bool = False, vocab_size: int = 151_936, **block: int
) -> Case:
    """A case from the sizes in use; `block` as in `dflash_prepare_block.cases.Case`."""
    return Case(
        name,
        resolve_cases.Case(name, batch, carry, poison, vocab_size),
        prepare_cases.Case(name, batch, **block),
    )


CASES = (
    make_case("one row", 1),
    make_case("plain decoding", 6, block_size=1),
    make_case("odd sizes, poisoned", 7, poison=True, block_size=5, page_size=3, num_pages=600),
    make_case(
        "prime batch, eagle carry", 13, resolve_cases.NARROW_EAGLE, block_size=7, page_size=16
    ),
    make_case("largest block past its table", 8, block_size=64, page_size=16, num_pages=3),
    make_case("odd carry", 3, (((7,), "float32"), ((), "bool")), poison=True, block_size=3),
)

BENCH_CASES = tuple(
    make_case(f"{kind}batch {batch}", batch, carry)
    for kind, carry in (("", ()), ("eagle ", resolve_cases.EAGLE))
    for batch in (1, 8, 32, 256)
)


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and static keywords of the op."""
    rng = resolve_cases.generator(case.name)
    max_len = case.prepare.num_pages * case.prepare.page_size
    relay = resolve_cases.make_relay(case.resolve, rng, max_len)
    static = {
        "vocab_size": case.resolve.vocab_size,
        "poison": case.resolve.poison,
        **prepare_cases.static_of(case.prepare),
    }
    return (*relay, prepare_cases.make_page_table(case.prepare, rng)), static
