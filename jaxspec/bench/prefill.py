"""`jaxspec bench prefill`: a long prompt against the arithmetic that it cannot do without."""

from __future__ import annotations

import statistics
import time

from jaxspec.bench.floor import matmul_flops_per_s, prefill_flops
from jaxspec.bench.report import Column, Result, number
from jaxspec.bench.rig import Rig, build_engine, describe, load_rig
from jaxspec.bench.settings import Settings
from jaxspec.engine.engine import Engine
from jaxspec.request import Request, SamplingParams

COLUMNS = (
    Column("drafter", "drafter"),
    Column("num_tokens", "tokens"),
    Column("prefill_ms_median", "ms, median", number(0)),
    Column("prefill_ms", "best", number(0)),
    Column("floor_ms", "floor ms", number(0)),
    Column("ratio", "ratio", number(2)),
    Column("gflops_per_s", "machine GFLOP/s", number(0)),
)
NUM_TOKENS = 1000


def run(settings: Settings) -> Result:
    """Times a prompt of 1,000 tokens to its first token, in turns with a large matrix product."""
    rows = []
    for drafter in settings.drafters:
        rig = load_rig(
            settings.config_with(drafter),
            cache_dir=settings.cache_dir,
            on_progress=settings.on_progress,
        )
        settings.on_progress(f"measuring {drafter}", 0, 0)
        engine = build_engine(rig)
        time_prefill(rig, engine)  # compiles
        prefill_s, rates = [], []
        for _ in range(settings.repeats):
            rates.append(matmul_flops_per_s(rig.geometry.dtype))
            prefill_s.append(time_prefill(rig, engine))
        floor_s = prefill_flops(rig.model_config, NUM_TOKENS) / max(rates)
        rows.append(
            {
                **describe(rig),
                "num_tokens": NUM_TOKENS,
                "prefill_ms_median": 1e3 * statistics.median(prefill_s),
                "prefill_ms": 1e3 * min(prefill_s),
                "floor_ms": 1e3 * floor_s,
                "ratio": min(prefill_s) / floor_s,
                "gflops_per_s": max(rates) / 1e9,
                "gflops_per_s_median": statistics.median(rates) / 1e9,
            }
        )
    return Result(
        "prefill against the arithmetic floor",
        COLUMNS,
        rows,
        {
            "floor": "the prompt's operations at the best rate of a 2048 x 2048 matrix product "
            "in the same run",
            "ratio": f"of the best of {settings.repeats} prompts to the floor",
        },
    )


def time_prefill(rig: Rig, engine: Engine) -> float:
    """Seconds from a prompt to its first token on the host."""
    usable = rig.geometry.vocab_size - 1
    prompt = tuple(1 + index % usable for index in range(NUM_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    before = time.perf_counter()
    engine.add_request(Request("prefill", prompt, params))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - before
