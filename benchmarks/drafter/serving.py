"""Tokens a second of plain decoding and of a drafter on the same prompts, at batch 1 and 32.

    python benchmarks/drafter/serving.py --drafter none --drafter dflash \
        --prompts benchmarks/drafter/held-out.prompts.jsonl

Prints one JSON object a drafter and batch size. Both sizes share an engine, whose programs are
compiled and run before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from jaxspec.bench.acceptance import prompt_sets, row_of
from jaxspec.bench.rig import build_engine, load_rig, make_requests, run_workload
from jaxspec.compilation_cache import use_compilation_cache
from jaxspec.config import EngineConfig
from jaxspec.engine.warmup import warmup
from jaxspec.llm import default_cache_dir
from jaxspec.mode import Mode
from jaxspec.weights.files import no_progress

WORK = ((1, 12, 160), (32, 160, 256))  # (requests at once, prompts, tokens of an answer at most)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", required=True, help="may be repeated")
    parser.add_argument("--prompts", required=True, help="a file of prompts, as .jsonl or lines")
    parser.add_argument("--limit", type=int, help="prompts of a batch size at most")
    args = parser.parse_args()
    use_compilation_cache(default_cache_dir() / "compiled")
    (prompts,) = prompt_sets([args.prompts]).values()
    for drafter in args.drafter:
        config = EngineConfig(
            model=args.model, drafter=drafter, max_num_seqs=32, max_model_len=1024
        )
        rig = load_rig(config, cache_dir=default_cache_dir(), on_progress=no_progress)
        # These sizes alone, so that little is compiled.
        geometry = replace(rig.geometry, batch_buckets=(1, 32))
        engine = build_engine(rig._replace(geometry=geometry))
        warmup(engine, modes=(Mode.GREEDY,))
        for batch, count, max_tokens in WORK:
            count = min(count, args.limit or count)
            requests = make_requests(rig, count, max_tokens=max_tokens, prompts=prompts)
            work = run_workload(engine, requests, concurrency=batch)
            row = row_of("held-out", work.outputs)
            print(
                json.dumps(
                    {
                        "drafter": Path(drafter).name,
                        "batch": batch,
                        "prompts": count,
                        "tokens_per_s": round(work.tokens_per_s, 1),
                        "step_ms": work.step_ms,
                        "mean_accept_length": row["mean_accept_length"],
                        "num_looped": row["num_looped"],
                        "compiled_while_serving": work.num_compilations,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
