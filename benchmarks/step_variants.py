"""Times decode steps alone, called in a chain, for several shapes, batches and choices of kernels.

For a GPU that is lent by the minute: everything is compiled side by side first, nothing is served
and no prompt is read. `jaxspec bench roofline` times the same steps through the engine.

    PYTHONPATH=. python benchmarks/step_variants.py --out benchmarks/results qwen3-8b:none:1 \\
        qwen3-8b:none:1:early_launch=off smollm2-135m:none:1:few_row_gemm=xla,decode_steps=4

A case is shape:drafter:batch, and behind it what differs from the defaults: an op of the kernels,
early_launch, or decode_steps. Every row has 1,024 rows of KV at first (half of what a smaller model
takes), and each step with a drafter, dflash or eagle3, accepts five drafts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.floor import Machine, Work, measure_machine
from jaxspec.bench.report import facts
from jaxspec.bench.shapes import SHAPES, plan_shape, random_target, step_work
from jaxspec.bench.step_profile import profile_calls
from jaxspec.config import EngineConfig, Geometry
from jaxspec.drafters.base import Drafter, ModelParams
from jaxspec.engine.assemble import choose_dtype
from jaxspec.engine.parts import build_parts
from jaxspec.engine.state import EngineState, init_state
from jaxspec.engine.steps import Step, build_steps
from jaxspec.mode import Mode
from jaxspec.models import Target
from kernels_pallas.dispatch import Device

CONTEXT = 1024
ACCEPTED = 5
WARM, ROUNDS, STEPS = 4, 3, 30


class Case(NamedTuple):
    """What is timed; changes: of the kernels chosen for this device."""

    name: str
    shape: str
    drafter: str
    batch: int
    decode_steps: int
    changes: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Case:
        shape, drafter, batch, *rest = text.split(":")
        pairs = [pair for part in rest for pair in part.split(",")]
        changes: dict[str, Any] = dict(pair.split("=") for pair in pairs)
        decode_steps = int(changes.pop("decode_steps", 1))
        if "early_launch" in changes:
            changes["early_launch"] = changes["early_launch"] == "on"
        return cls(text, shape, drafter, int(batch), decode_steps, changes)


class Program(NamedTuple):
    """A case's step, and what it is called on."""

    case: Case
    geometry: Geometry
    target: Target
    drafter: Drafter
    params: ModelParams
    step: Step
    packed: np.ndarray

    @property
    def accept_length(self) -> int:
        return 1 + (self.geometry.force_accept or 0)

    @property
    def context(self) -> int:
        return self.geometry.max_model_len // 2

    def state(self) -> EngineState:
        """All rows in the middle of their requests."""
        state = init_state(self.geometry, self.target, self.drafter)
        size = self.geometry.num_slots + 1
        lens = jnp.full((size,), self.context, jnp.int32).at[0].set(1)
        frozen = jnp.zeros((size,), bool).at[0].set(True)
        ends = jnp.full((size,), self.geometry.max_model_len, jnp.int32)
        return state.replace(
            future_map=state.future_map.replace(seq_lens=lens),
            limits=state.limits.replace(max_lens=ends, frozen=frozen),
        )


def build(case: Case, target_params: Any, device: Device, dtype: str) -> Program:
    """Builds a case's program; nothing is compiled yet."""
    shape, drafts = SHAPES[case.shape], case.drafter != "none"
    config = EngineConfig(
        max_num_seqs=case.batch,
        max_model_len=min(2 * CONTEXT, shape.target.max_position_embeddings),
        max_num_batched_tokens=64,
        decode_steps=case.decode_steps,
    )
    if drafts:
        accepted = min(ACCEPTED, shape.block_size(case.drafter, config) - 1)
        config = dataclasses.replace(config, force_accept=accepted)
    plan = plan_shape(shape, case.drafter, config, dtype)
    params = ModelParams(target=target_params, drafter=plan.params)
    parts = build_parts(
        config,
        shape.target,
        plan,
        params,
        dtype=dtype,
        device=device,
        memory_bytes=1 << 40,  # never the limit
        kernels=case.changes,
    )
    geometry, target, drafter, *_ = parts
    steps = build_steps(geometry, target, drafter, mode=Mode.GREEDY)
    step = steps.decode if case.decode_steps == 1 else steps.decode_loop
    pages = 1 + np.arange(case.batch * geometry.pages_per_slot, dtype=np.int32)
    rows = 1 + np.arange(case.batch, dtype=np.int32)
    packed = np.concatenate([rows[:, None], pages.reshape(case.batch, -1)], axis=1)
    return Program(case, geometry, target, drafter, params, step, packed)


def time_program(program: Program, compiled: Step, machine: Machine) -> dict[str, Any]:
    """The best of a few chains, the host's part of a call, and the kernels of one."""
    state, params = program.state(), program.params
    packed = jax.device_put(program.packed)

    def call() -> jax.Array:
        nonlocal state
        state, output = compiled(params, state, packed)
        return output

    for _ in range(WARM):
        output = call()
    text = np.asarray(output).reshape(-1)[:8].tolist()
    num_calls = max(2, STEPS // program.case.decode_steps)
    num_steps = num_calls * program.case.decode_steps
    chains, calls = [], []
    for _ in range(ROUNDS):
        jax.block_until_ready(state)
        before = time.perf_counter()
        for _ in range(num_calls):
            started = time.perf_counter()
            call()
            calls.append(time.perf_counter() - started)
        jax.block_until_ready(state)
        chains.append((time.perf_counter() - before) / num_steps)
    kernels = profile_calls(call, 2)
    best = int(np.argmin(chains))
    steps_before = WARM * program.case.decode_steps + (best + 0.5) * num_steps
    context = program.context + program.accept_length * steps_before
    floor_s = _work(program, context).floor_s(machine)
    return {
        "case": program.case.name,
        "shape": program.case.shape,
        "step": "plain" if program.case.drafter == "none" else program.case.drafter,
        "batch": program.case.batch,
        "context": context,
        "decode_steps": program.case.decode_steps,
        "changes": program.case.changes,
        "ms": 1e3 * chains[best],
        "floor_ms": 1e3 * floor_s,
        "ratio": chains[best] / floor_s,
        "dispatch_ms": 1e3 * min(calls),
        "launches": sum(row["launches"] for row in kernels) / program.case.decode_steps,
        "text": text,
        "top_kernels": kernels[:30],
    }


def _work(program: Program, context: float) -> Work:
    return step_work(
        SHAPES[program.case.shape],
        program.case.drafter,
        block=program.geometry.block_size,
        batch=program.case.batch,
        context=context,
        itemsize=jnp.dtype(program.geometry.dtype).itemsize,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="SHAPE:DRAFTER:BATCH[:CHANGES]")
    parser.add_argument("--out", type=Path, help="folder for step_variants.json")
    args = parser.parse_args()
    cases = [Case.parse(text) for text in args.cases]
    device = Device.current()
    dtype, _ = choose_dtype("auto", device)
    machine = measure_machine(dtype)
    targets = {name: random_target(SHAPES[name].target, dtype) for name in {c.shape for c in cases}}
    programs = [build(case, targets[case.shape], device, dtype) for case in cases]
    with ThreadPoolExecutor() as pool:
        compiling = []
        for each in programs:
            state = jax.eval_shape(each.state)
            lowered = each.step.lower(each.params, state, each.packed)
            compiling.append(pool.submit(lowered.compile))
        # All of them: compiling tries kernels on the device, which disturbs what is timed there.
        compiled = [job.result() for job in compiling]
    results = {
        **facts(),
        "command": "python benchmarks/step_variants.py " + " ".join(args.cases),
        "copy_TB_per_s": machine.copy_bytes_per_s / 1e12,
        "matmul_TFLOP_per_s": machine.flops_per_s / 1e12,
        "rows": [],
    }
    for program, step in zip(programs, compiled, strict=True):
        row = time_program(program, step, machine)
        results["rows"].append(row)
        print(f"{row['case']}: {row['ms']:.3f} ms, {row['ratio']:.2f} of the floor", flush=True)
        if args.out is not None:
            file = args.out / "step_variants.json"
            file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
