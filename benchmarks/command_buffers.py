"""Counts what XLA does to its command buffers (CUDA graphs) while an engine serves, on a GPU.

A step's graph is recorded once, while programs are compiled. Later calls launch it; where a buffer
lies elsewhere than in the call before, XLA sets the parameters of the launches that read it anew.
What it logs about that is counted here, step by step, in an engine that decodes with overlap.

    PYTHONPATH=. python benchmarks/command_buffers.py --out FOLDER smollm2-135m:none:1 ...

A case is shape:drafter:batch, as `jaxspec bench roofline` names them. With a mode behind it (as in
shape:drafter:batch:logprobs) the engine serves a greedy batch, one of that mode, and a greedy one
again: what other requests leave in memory must not cost the greedy ones more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONTEXT, STEPS, SETTLE = 512, 48, 8
_ASKING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "edited": {"frequency_penalty": 0.5},
    "logprobs": {"logprobs": 20},
}
_BEGIN, _END = "-- steady steps begin", "-- steady steps end"
_LOGGED = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "command_buffer_thunk=5,command_executor=5",
}
_UPDATED = re.compile(r"Updated (\d+) commands in \d+ .{1,3}s \(skipped (\d+) command updates\)")


def serve(case: str) -> None:
    """Serves a case in this process and marks its steady steps in the log."""
    from jaxspec.bench.compilations import count_compilations
    from jaxspec.bench.shape_rig import ShapeRig
    from jaxspec.bench.shapes import SHAPES, random_target
    from jaxspec.config import EngineConfig
    from jaxspec.mode import Mode

    name, drafter, batch, *other = case.split(":")
    shape, size = SHAPES[name], int(batch)
    modes = tuple(Mode[each.upper()] for each in other)
    rig = ShapeRig(
        EngineConfig(max_num_seqs=size, max_model_len=2 * CONTEXT),
        shape,
        random_target(shape.target, "bfloat16"),
        drafter=drafter,
        dtype="bfloat16",
        batches=(size,),
        split=False,
        modes=modes,
    )
    requests = rig.requests(size, CONTEXT, CONTEXT)
    engine = rig.engine(rig.step, overlap=True, known=requests)
    for mode in (Mode.GREEDY, *modes, Mode.GREEDY)[: 1 + 2 * len(modes)]:
        asked = dataclasses.replace(requests[0].params, **_ASKING[mode.name.lower()])
        for request in requests:
            engine.add_request(dataclasses.replace(request, params=asked))
        engine.stats.reset()
        while engine.stats.num_decode_steps < SETTLE:
            engine.step()
        a_dispatch = rig.accept_length * rig.geometry.decode_steps
        num_steps = min(STEPS, CONTEXT // a_dispatch - SETTLE - 2)  # nobody ends meanwhile
        print(f"{_BEGIN} {mode.name.lower()}", file=sys.stderr, flush=True)
        with count_compilations() as compiled:
            for _ in range(num_steps):
                engine.step()
        print(f"{_END} {num_steps}", file=sys.stderr, flush=True)
        assert not compiled.count, f"{compiled.count} programs were compiled while serving"
        for request in requests:
            engine.abort(request.request_id)
        while engine.has_unfinished:
            engine.step()


def count(case: str) -> list[dict[str, Any]]:
    """Serves a case in a process of its own and counts what its log says."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, __file__, "--serve", case]
        done = subprocess.run(command, stderr=log, env={**os.environ, **_LOGGED}, check=False)
        log.seek(0)
        text = log.read()
    if done.returncode:
        sys.exit(f"{case} ended with status {done.returncode}: {text[-2000:]}")
    return [
        {
            "case": case,
            "batch_of": steady.split(maxsplit=1)[0],
            "dispatches": int(rest.split(maxsplit=1)[0]),
            **count_steps(steady),
        }
        for steady, rest in (each.split(_END) for each in text.split(_BEGIN)[1:])
    ]


def count_steps(steady: str) -> dict[str, Any]:
    """Counts what the log of steady steps says."""
    found = [(int(all_), int(skipped)) for all_, skipped in _UPDATED.findall(steady)]
    changed = sorted(all_ - skipped for all_, skipped in found)
    return {
        "launches_of_graphs": steady.count("Execute command buffer"),
        "graphs_recorded": len(re.findall(r"Record create \d+ commands", steady)),
        "commands": max((all_ for all_, _ in found), default=None),
        "updates": len(found),
        "median_commands_updated": changed[len(changed) // 2] if changed else 0,
        "max_commands_updated": changed[-1] if changed else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="SHAPE:DRAFTER:BATCH[:MODE]")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for command_buffers.json")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    rows = []
    for case in args.cases:
        for row in count(case):
            rows.append(row)
            print(row, flush=True)
    if args.out is not None:
        from jaxspec.bench.report import facts

        args.out.mkdir(parents=True, exist_ok=True)
        command = "python benchmarks/command_buffers.py " + " ".join(args.cases)
        results = {**facts(), "command": command, "rows": rows}
        (args.out / "command_buffers.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
