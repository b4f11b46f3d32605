"""Times launches of `few_row_gemm` beside those that `choose` makes, and beside XLA's product.

Each is timed by the wall clock in a chain of calls, one after the other in a command buffer, each
followed by what follows it in a layer: `kv_write` behind qkv, `add_rms_norm` behind o and down,
which also add up the parts of a split product. A profile of single calls does not see what early
launch hides. Every call reads a weight that is not in L2, and rows that depend on the call before
it: XLA computes equal products once. What it computes is held against XLA's before it is timed.

    python -m kernels_pallas.few_row_gemm.sweep --rows 1 16 32 64 128 512 --out FOLDER
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

from kernels_pallas import add_rms_norm, kv_write, measure, roofline
from kernels_pallas.early_launch import AHEAD_MIN_JAX, program_id
from kernels_pallas.few_row_gemm import mosaic_few_rows, mosaic_gpu, triton
from kernels_pallas.few_row_gemm.triton import Config

CALLS = 24  # in a chain
_NUDGE_TILE = 1024
ROUNDS, IN_A_ROW = 4, 6
MAX_ERROR = 0.05  # of the largest result, after a chain of sums in 16 bits


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
    "qkv": ((64, 128, 4, 6, True), (64, 256, 4, 4, True)),
    "o": ((32, 256, 4, 6, False),),
    "gate_up": (),
    "down": ((32, 512, 4, 4, False),),
}
MANY_ROWS = {
    "qkv": ((64, 64, 4, 6, True),),
    "o": ((64, 64, 4, 6, True, 2),),
    "gate_up": ((64, 64, 4, 3, True),),
    "down": ((64, 64, 4, 6, True, 2),),
}
# tile_k, num_stages, x_stages, splits, per_sm.
EARLY = {
    "qkv": ((256, 5, 3), (128, 6, 4)),
    "o": ((128, 6, 3, 2), (256, 5, 3, 2)),
    "gate_up": ((128, 3, 3, 1, 2), (64, 6, 6, 1, 2), (128, 5, 4)),
    "down": ((256, 5, 3, 2), (128, 6, 4, 2)),
}
# rows: tile_n, tile_k, num_stages, splits.
MOSAIC = {
    128: {
        "qkv": ((48, 64, 9, 1), (96, 64, 6, 1)),
        "o": ((64, 64, 7, 2), (128, 64, 5, 4), (32, 64, 10, 1)),
        "gate_up": ((96, 64, 5, 1), (96, 64, 4, 1), (64, 64, 6, 1)),
        "down": ((64, 64, 7, 2), (128, 64, 5, 4), (64, 128, 4, 2), (128, 128, 3, 4)),
    },
    256: {
        "qkv": ((96, 64, 7, 1), (192, 64, 4, 1)),
        "o": ((64, 64, 8, 1), (128, 64, 6, 2)),
        "gate_up": ((96, 64, 5, 1), (64, 64, 6, 1), (128, 64, 4, 1)),
        "down": ((64, 64, 8, 1), (128, 64, 6, 2)),
    },
    512: {
        "qkv": ((192, 64, 4, 1), (192, 64, 5, 1), (96, 64, 7, 1)),
        "o": ((128, 64, 6, 1),),
        "gate_up": ((128, 64, 4, 1), (96, 64, 5, 1)),
        "down": ((128, 64, 6, 1),),
    },
}
_BLOCK = 16  # tokens of a row, where there are as many rows
_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 32, 8, 128, 64


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
    if num_rows <= triton.MAX_ROWS:
        yield chosen
    others = FEW_ROWS if num_rows <= 32 else MANY_ROWS if num_rows <= 128 else {}
    for each in others.get(name, ()):
        if Config(*each) != chosen:
            yield Config(*each)


def product_jobs(name: str, num_rows: int, weights: tuple[jax.Array, ...]) -> Iterator[Job]:
    """XLA's chain, then one a config.

    weights: enough of them that none is in L2 when its turn comes.
    """
    product = PRODUCTS[name]
    around, carry, others = _around(name, num_rows)
    small = 2 * num_rows * (product.width + product.outputs)

    def job(config: str, run: Callable[..., jax.Array]) -> Job:
        # A jit of its own, so that a kernel is traced and lowered once.
        once = jax.jit(run)

        def chain(carry, others, weights):
            for i in range(CALLS):
                weight = weights[i % len(weights)]
                carry = around(carry, others, lambda x, weight=weight: once(x, weight))
            return carry

        label = f"{name}, {num_rows} rows"
        num_bytes = product.weight_bytes + small
        return Job(label, config, chain, (others, weights), carry, CALLS, num_bytes)

    yield job("xla", functools.partial(_xla, swiglu=product.swiglu))
    for config in configs(name, num_rows):
        yield job(
            _words(config),
            lambda x, weight, config=config: triton.few_row_gemm(
                x,
                weight,
                None,
                swiglu=product.swiglu,
                early_launch=True,
                interpret=False,
                config=config,
            ),
        )
    is_ahead = num_rows <= triton.MAX_ROWS and jax.__version_info__ >= AHEAD_MIN_JAX
    for each in EARLY[name] if is_ahead else ():
        early = mosaic_few_rows.Config(*each)
        run = functools.partial(
            mosaic_few_rows.few_row_gemm, swiglu=product.swiglu, config=early, early_launch=True
        )
        yield job(f"early {', '.join(f'{k} {v}' for k, v in early._asdict().items())}", run)
    for each in MOSAIC.get(num_rows, {}).get(name, ()):
        wide = mosaic_gpu.Config(*each)
        run = functools.partial(mosaic_gpu.few_row_gemm, swiglu=product.swiglu, config=wide)
        yield job(f"mosaic {', '.join(f'{k} {v}' for k, v in wide._asdict().items())}", run)


def _xla(x: jax.Array, weight: jax.Array, *, swiglu: bool) -> jax.Array:
    """As a layer has it where no kernel of ours runs."""
    out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    if not swiglu:
        return out
    gate, up = jnp.split(out, 2, axis=1)
    return jax.nn.silu(gate) * up


def _around(name: str, num_rows: int) -> tuple[Callable[..., Any], Any, Any]:
    """What stands around a product in a layer: (carry, others, product) -> carry; both at first."""
    product = PRODUCTS[name]
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (num_rows, product.width), jnp.bfloat16)
    early = {"early_launch": _on_gpu(), "implementation": "triton" if _on_gpu() else "xla"}

    def qkv(carry, others, multiply):
        x, kv_pages = carry
        block = _BLOCK if num_rows % _BLOCK == 0 else 1
        made = multiply(x).reshape(num_rows // block, block, -1)
        locs = _PAGE_SIZE + jnp.arange(num_rows, dtype=jnp.int32).reshape(made.shape[:2])
        q, kv_pages = kv_write.kv_write(
            made,
            kv_pages,
            locs,
            locs,
            others,
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            **early,
        )
        return q.reshape(num_rows, -1), kv_pages

    def added(carry, others, multiply):
        stream, normed = carry
        weight, x = others
        # What down multiplies is wider than the stream: moved by it, in a launch of its own.
        delta = multiply(normed if x is None else nudge(x, normed))
        return add_rms_norm.add_rms_norm(stream, delta, weight, **early)

    def alone(carry, x, multiply):
        return multiply(nudge(x, carry))

    match name:
        case "qkv":
            pages = (2 + num_rows // _PAGE_SIZE, 2, _KV_HEADS, _PAGE_SIZE, _HEAD_DIM)
            return qkv, (x, jnp.zeros(pages, x.dtype)), jnp.ones(_HEAD_DIM // 2)
        case "gate_up":
            return alone, jnp.zeros((num_rows, product.outputs), x.dtype), x
    stream = jax.random.normal(keys[1], (num_rows, product.outputs), x.dtype)
    is_square = product.width == product.outputs
    others = (jnp.ones(product.outputs, x.dtype), None if is_square else x)
    return added, (stream, jax.random.normal(keys[2], stream.shape, x.dtype)), others


def _on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


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

    interpret = not _on_gpu()
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
    result = jax.tree.leaves(chain(jax.tree.map(jnp.copy, job.carry), *job.others))
    exact = expected.setdefault(job.name, result)
    error = max(
        float(jnp.abs(one - other).max() / jnp.abs(other).max())
        for one, other in zip(result, exact, strict=True)
    )
    if not error <= MAX_ERROR:
        return {"note": f"wrong: error {error:.3g}"}
    us = 1e6 * _best_s(chain, jax.tree.map(jnp.copy, job.carry), job.others) / job.calls
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
    jobs = []
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
