"""Measures accept lengths of drafters on held-out chat and on HumanEval, greedy and at T = 1.

Prints one JSON object a drafter, set and temperature.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import assemble
from jaxspec.llm import default_cache_dir
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.evaluate import measure_acceptance
from jaxspec.training.prompts import read_prompts

_CODE = "Complete the following Python function:\n\n```python\n{prompt}```"


def main() -> None:
    """Runs the measurements that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", required=True, help="may be repeated")
    parser.add_argument("--chat", type=Path, help=".jsonl of held-out prompts")
    parser.add_argument("--code", type=Path, help="HumanEval's .jsonl")
    parser.add_argument("--limit", type=int, default=128, help="prompts of a set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, action="append")
    args = parser.parse_args()
    for drafter in args.drafter:
        assembled = assemble(
            EngineConfig(
                model=args.model,
                drafter=drafter,
                max_num_seqs=args.max_num_seqs,
                max_model_len=args.max_model_len,
            ),
            cache_dir=default_cache_dir(),
            detokenize=False,
        )
        for name, prompts in prompt_sets(args, assembled.tokenizer).items():
            for temperature in args.temperature or [0.0, 1.0]:
                started = time.perf_counter()
                row = measure_acceptance(
                    assembled.engine,
                    prompts,
                    temperature=temperature,
                    max_tokens=args.max_tokens,
                )
                row = {
                    "drafter": Path(drafter).name,
                    "prompts": name,
                    "temperature": temperature,
                    **asdict(row),
                    "seconds": round(time.perf_counter() - started, 1),
                }
                print(json.dumps(row), flush=True)


def prompt_sets(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """The sets as token ids, every prompt a user's first turn."""
    texts = {}
    if args.chat:
        texts["chat, held out"] = read_prompts(args.chat)
    if args.code:
        texts["HumanEval"] = [_CODE.format(prompt=p + "\n") for p in read_prompts(args.code)]
    return {
        name: [
            tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
            for text in some[: args.limit]
        ]
        for name, some in texts.items()
    }


if __name__ == "__main__":
    main()
