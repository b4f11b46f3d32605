"""`jaxspec generate`: answers one prompt. Host only."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.bench.metrics import request_figures
from jaxspec.commands.common import (
    EXIT_FAILED,
    add_engine_and_sampling,
    add_prompting,
    check_chat_template,
    decode_utf8,
    engine_of,
    kernels_of,
    piped_input,
    print_choices,
    print_figures,
    sampling_of,
    within_context,
    write,
)
from jaxspec.config import EngineConfig
from jaxspec.options import Parser
from jaxspec.progress import ProgressDisplay
from jaxspec.request import FinishReason, RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.prompts import EncodedPrompt

_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}
_MIN_CONTEXT = 512  # short prompts share one set of compiled programs


def add_arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--verbose", action="store_true", help="show on stderr what was chosen, and why"
    )
    add_prompting(parser)
    add_engine_and_sampling(parser, _DEFAULTS)


def run(args: argparse.Namespace, cache_dir: Path) -> int:
    """Streams the answer to stdout and a line of figures to stderr; returns the exit status."""
    params, config = sampling_of(args, _DEFAULTS), engine_of(args)
    text = decode_utf8(piped_input().read()) if args.prompt == "-" else args.prompt
    if not text.strip():
        raise RequestError("the prompt is empty; give it some text")
    from jaxspec.engine.warmup import compile_for

    with ProgressDisplay() as progress:
        llm, prompt = _load(args, config, params, text, cache_dir, progress)
        if args.verbose:
            print_choices(llm)
        params = within_context(params, args, llm.config.max_model_len)
        stream = llm.stream({"prompt_token_ids": prompt.token_ids}, params)
        progress("compiling", 0, 0)
        compile_for(llm.engine, len(prompt.token_ids), params)
        delta = next(stream)
    while True:
        if not args.json:
            write(delta.text)
        if delta.finished:
            return _report(llm, delta.output, text, as_json=args.json)
        delta = next(stream)


def _load(
    args: argparse.Namespace,
    config: EngineConfig,
    params: SamplingParams,
    text: str,
    cache_dir: Path,
    progress: ProgressDisplay,
) -> tuple[LLM, EncodedPrompt]:
    """Loads a model for one prompt: a context that holds it, and nothing compiled beforehand."""
    from jaxspec.engine.assemble import open_model
    from jaxspec.llm import LLM
    from jaxspec.prompts import encode_chat, encode_prompt

    opened = open_model(config, cache_dir=cache_dir, on_progress=progress)
    if args.raw:
        prompt = encode_prompt(opened.tokenizer, text)
    else:
        check_chat_template(opened.tokenizer)
        messages = [{"role": "user", "content": text}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        prompt = encode_chat(opened.tokenizer, messages, enable_thinking=args.enable_thinking)
    if config.max_model_len is None:
        fitting = fitting_context(len(prompt.token_ids) + (params.max_tokens or 0))
        longest = opened.checkpoint.config.max_position_embeddings
        config = replace(config, max_model_len=min(fitting, longest))
    llm = LLM.from_config(
        config,
        lazy=True,
        cache_dir=cache_dir,
        compilation_cache=args.compilation_cache,
        on_progress=progress,
        opened=opened,
    )
    return llm, prompt


def fitting_context(num_tokens: int) -> int:
    """The context that is compiled for a request: a power of two, so that few programs serve."""
    return max(_MIN_CONTEXT, 1 << (num_tokens - 1).bit_length())


def _report(llm: LLM, output: RequestOutput, text: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(_result(llm, output, text), ensure_ascii=False))
    else:
        write("\n")
        print_figures(llm, output)
    if output.outputs[0].finish_reason is FinishReason.ERROR:
        print(f"jaxspec: the request failed: {output.error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _result(llm: LLM, output: RequestOutput, text: str) -> dict[str, Any]:
    """What `jaxspec generate --json` prints."""
    completion = output.outputs[0]
    return {
        "model": llm.config.model,
        "prompt": text,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": output.error,
        "lossless": llm.assembled.lossless,
        "drafter": llm.assembled.drafter_name,
        "kernels": kernels_of(llm),
        "figures": request_figures(output),
        "choices": [
            {"what": what, "choice": choice, "reason": reason}
            for what, choice, reason in llm.assembled.choices
        ],
    }
