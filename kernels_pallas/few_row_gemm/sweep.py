"""Times other launches of `few_row_gemm`, and of `kv_write`, beside those that `choose` makes.

Each is timed by the wall clock in a chain of calls, one after the other in a command buffer and
launched early, as in a step: a profile of single calls does not see what early launch hides. Every
call reads a weight that is not in L2, and rows that depend on the call before it: XLA computes
equal products once. What it computes is held against XLA's before it is timed.

    python -m kernels_pallas.few_row_gemm.sweep --rows 1 16 32 64 128 --out FOLDER
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import kv_write, measure, roofline
from kernels_pallas.early_launch import program_id
from kernels_pallas.few_row_gemm import mosaic_gpu, reference, triton
from kernels_pallas.few_row_gemm.triton import Config
from kernels_pallas.kv_write import cases as kv_write_cases
from kernels_pallas.kv_write import triton as kv_write_triton

CALLS = 24  # in a chain
_NUDGE_TILE = 1024
ROUNDS, IN_A_ROW = 4, 6
MAX_ERROR = 0.02  # of the largest result, after a chain of sums in 16 bits


class Product(NamedTuple):
    """Of Qwen3-8B: outputs, width."""

    outputs: int
    width: int
    swiglu: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.outputs * self.width * (2 if self.swiglu else 1)


PRODUCTS = {
    "qkv": Product(6144, 4096),
    "o": Product(4096, 4096),
    "gate_up": Product(12288, 4096, swiglu=True),
    "down": Product(4096, 12288),
}
# tile_n, tile_k, num_warps, num_stages, weight_first, splits.
FEW_ROWS = {
    "qkv": (
        (64, 256, 4, 4, True),
        (32, 256, 4, 4, False),
        (32, 128, 4, 6, False),
        (16, 256, 4, 4, False),
        (64, 128, 4, 6, True),
        (64, 128, 4, 4, True, 2),
    ),
    "o": (
        (32, 128, 4, 8, False),
        (32, 256, 4, 6, False),
        (32, 512, 4, 4, False),
        (16, 256, 4, 6, False),
        (32, 128, 2, 12, False),
        (64, 128, 4, 6, True, 2),
    ),
    "gate_up": (),
    "down": ((32, 128, 4, 8, False), (32, 512, 4, 4, False)),
}
MANY_ROWS = {
    "qkv": (
        (64, 64, 4, 6, True),
        (64, 64, 8, 6, True),
        (128, 64, 8, 6, True),
        (128, 64, 8, 6, True, 2),
        (128, 64, 8, 3, True, 4),
    ),
    "o": (
        (64, 64, 4, 8, True),
        (64, 64, 4, 6, True, 2),
        (128, 64, 8, 6, True, 4),
        (128, 64, 8, 3, True, 8),
    ),
    "gate_up": (
        (64, 64, 4, 3, True),
        (64, 64, 8, 3, True),
        (64, 64, 8, 4, True),
        (128, 64, 8, 4, True),
    ),
    "down": (
        (64, 64, 4, 8, True),
        (64, 64, 4, 6, True, 2),
        (128, 64, 8, 6, True, 4),
        (128, 64, 8, 3, True, 8),
    ),
}
# tile_n, tile_k, num_stages, cluster, splits.
MOSAIC = {
    "qkv": (
        (96, 64, 6, 1, 2),
        (96, 64, 6, 2, 2),
        (64, 64, 7, 1),
        (64, 64, 7, 2),
        (128, 64, 5, 2, 2),
        (192, 64, 4, 1, 4),
    ),
    "o": (
        (32, 64, 8, 1),
        (32, 64, 8, 2),
        (64, 64, 7, 1, 2),
        (64, 64, 7, 2, 2),
        (128, 64, 5, 1, 4),
    ),
    "gate_up": ((96, 64, 5, 1), (96, 64, 5, 2), (96, 128, 2, 2), (64, 64, 6, 2), (128, 64, 4, 2)),
    "down": ((64, 64, 7, 1, 2), (64, 64, 7, 2, 2), (128, 64, 5, 1, 4), (128, 64, 5, 2, 4)),
}
KV_WRITE = ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2), (64, 4))


class Job(NamedTuple):
    """A chain to time: carry -> carry, of so many calls that move so many bytes each."""

    name: str
    config: str
    chain: Callable[..., Any]
    others: tuple[Any, ...]
    carry: Any
    calls: int
    num_bytes: int


def configs(name: str, num_rows: int) -> Iterator[Config]:
    """What `choose` makes of a product, then the others."""
    product = PRODUCTS[name]
    chosen = triton.choose(num_rows, product.outputs, product.width, product.swiglu, 16)
    yield chosen
    for each in (FEW_ROWS if num_rows <= 32 else MANY_ROWS)[name]:
        if Config(*each) != chosen:
            yield Config(*each)


def product_jobs(name: str, num_rows: int, weights: tuple[jax.Array, ...]) -> Iterator[Job]:
    """XLA's chain, then one a config. Each adds to the product before it and reads it, by a launch
    between them that all configs count alike.

    weights: enough of them that none is in L2 when its turn comes.
    """
    product = PRODUCTS[name]
    x = jax.random.normal(jax.random.key(1), (num_rows, product.width), jnp.bfloat16)
    carry = jnp.zeros((num_rows, product.outputs), jnp.bfloat16)
    small = 2 * num_rows * (product.width + 2 * product.outputs)

    def job(config: str, run: Callable[..., jax.Array]) -> Job:
        # A jit of its own, so that a kernel is traced and lowered once.
        once = jax.jit(functools.partial(run, swiglu=product.swiglu))

        def chain(carry, x, weights):
            for i in range(CALLS):
                carry = once(nudge(x, carry), weights[i % len(weights)], carry)
            return carry

        label = f"{name}, {num_rows} rows"
        others = (x, weights)
        return Job(label, config, chain, others, carry, CALLS, product.weight_bytes + small)

    yield job("xla", reference.few_row_gemm)
    for config in configs(name, num_rows):
        run = functools.partial(
            triton.few_row_gemm, early_launch=True, interpret=False, config=config
        )
        yield job(_words(config), run)
    if num_rows == mosaic_gpu.NUM_ROWS:
        for each in MOSAIC[name]:
            wide = mosaic_gpu.Config(*each)
            run = functools.partial(mosaic_gpu.few_row_gemm, config=wide)
            yield job(f"mosaic {', '.join(f'{k} {v}' for k, v in wide._asdict().items())}", run)


@jax.jit
def nudge(x: jax.Array, carry: jax.Array) -> jax.Array:
    """x[M, E] and a little of carry[M, out] in every row: a kernel, to be launched early."""
    num_rows, width = x.shape

    def kernel(x_ref, carry_ref, out_ref):
        row = program_id(0, interpret is False)
        column = pl.program_id(1) * _NUDGE_TILE + jnp.arange(_NUDGE_TILE, dtype=jnp.int32)
        inside = column < width
        little = 2.0**-8 * pltriton.load(carry_ref.at[row, jnp.int32(0)]).astype(jnp.float32)
        own = pltriton.load(x_ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
        moved = (own + little).astype(out_ref.dtype)
        pltriton.store(out_ref.at[row, column], moved, mask=inside)

    interpret = jax.devices()[0].platform == "cpu"
    return pl.pallas_call(
        kernel,
        name="nudge",
        grid=(num_rows, -(-width // _NUDGE_TILE)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(x, carry)


def _words(config: Config) -> str:
    first = "weight" if config.weight_first else "x"
    words = f"{config.tile_n} x {config.tile_k}, {config.num_warps} warps, {config.num_stages}"
    return f"{words} stages, {first} first" + f", {config.splits} splits" * (config.splits > 1)


def kv_write_jobs() -> Iterator[Job]:
    """32 requests of 16 tokens. XLA norms and rotates them once for all calls, so its figure is too
    low."""
    case = kv_write_cases.BENCH_CASES[-1]
    (qkv, kv_pages, *others), static = kv_write_cases.make_inputs(case)

    def job(config: str, run: Callable[..., Any]) -> Job:
        def chain(carry, qkv, *others):
            for _ in range(CALLS):
                _, carry = run(qkv, carry, *others)
            return carry

        num_bytes = 2 * qkv.size * qkv.dtype.itemsize
        carry = jnp.nan_to_num(kv_pages)
        return Job(case.name, config, chain, (qkv, *others), carry, CALLS, num_bytes)

    yield job("xla", jax.jit(functools.partial(kv_write.kv_write, **static)))
    static["layer"] = None
    for each in KV_WRITE:
        config = kv_write_triton.Config(*each)
        run = functools.partial(
            kv_write_triton.kv_write, early_launch=True, interpret=False, config=config, **static
        )
        yield job(f"{config.tile_heads} heads, {config.num_warps} warps", jax.jit(run))


def random_weights(product: Product) -> tuple[jax.Array, ...]:
    """As many weights as L2 cannot hold."""
    rows = product.outputs * (2 if product.swiglu else 1)
    keys = jax.random.split(jax.random.key(0), roofline.cold_sets(product.weight_bytes))
    make = jax.jit(
        lambda key: (
            jax.random.normal(key, (rows, product.width), jnp.bfloat16)
            * jnp.bfloat16(product.width**-0.5)
        )
    )
    return tuple(make(key) for key in keys)


def compile_jobs(jobs: list[Job]) -> list[Callable[..., Any] | Exception]:
    """Compiles side by side; what a compiler refuses is its exception."""

    def compile_one(job: Job) -> Callable[..., Any] | Exception:
        try:
            chain = jax.jit(job.chain, donate_argnums=0)
            return chain.lower(job.carry, *job.others).compile()
        except Exception as error:  # a config too large for the device is a result, too
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile_one, jobs))


def time_jobs(jobs: list[Job], bandwidth: float) -> Iterator[measure.Row]:
    """A row a job; the first of each name, XLA's, is what the others are held against.

    bandwidth: of a copy, bytes a us.
    """
    expected: dict[str, jax.Array] = {}
    for job, chain in zip(jobs, compile_jobs(jobs), strict=True):
        row = {"case": job.name, "config": job.config}
        if isinstance(chain, Exception):
            yield {**row, "note": f"not compiled: {str(chain).splitlines()[0][:80]}"}
            continue
        try:
            yield row | _measure(job, chain, expected, bandwidth)
        except jax.errors.JaxRuntimeError as error:
            yield {**row, "note": f"failed: {str(error).splitlines()[0][:80]}"}


def _measure(
    job: Job, chain: Callable[..., Any], expected: dict[str, jax.Array], bandwidth: float
) -> measure.Row:
    result = chain(jnp.copy(job.carry), *job.others)
    exact = expected.setdefault(job.name, result)
    error = float(jnp.abs(result - exact).max() / jnp.abs(exact).max())
    if not error <= MAX_ERROR:
        return {"note": f"wrong: error {error:.3g}"}
    us = 1e6 * _best_s(chain, jnp.copy(job.carry), job.others) / job.calls
    share = job.num_bytes / us / bandwidth
    return {"us": round(us, 2), "share_of_copy_bandwidth": round(share, 3)}


def _best_s(chain: Callable[..., Any], carry: Any, others: tuple[Any, ...]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        jax.block_until_ready(carry)
        before = time.perf_counter()
        for _ in range(IN_A_ROW):
            carry = chain(carry, *others)
        jax.block_until_ready(carry)
        best = min(best, (time.perf_counter() - before) / IN_A_ROW)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128])
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--out", type=Path, help="folder for sweep_few_row_gemm.json")
    args = parser.parse_args()
    before = time.perf_counter()
    bandwidth = roofline.copy_bandwidth()
    jobs = list(kv_write_jobs())
    for name in args.products:
        weights = random_weights(PRODUCTS[name])
        for num_rows in args.rows:
            jobs += product_jobs(name, num_rows, weights)
    # Mosaic last: what hangs or breaks the device takes no other figure with it.
    jobs.sort(key=lambda job: job.config.startswith("mosaic"))
    rows = []
    for row in time_jobs(jobs, bandwidth):
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "sweep_few_row_gemm.json").write_text(json.dumps(rows, indent=1) + "\n")
    seconds = time.perf_counter() - before
    print(f"{len(jobs)} chains in {seconds:.0f} s; a copy moves {bandwidth / 1e6:.2f} TB/s")


if __name__ == "__main__":
    main()
