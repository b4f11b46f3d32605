"""Compiles decode steps for an H200 on a machine without a GPU, and says what they launch.

Shows what no CPU run can: how many kernels and copies a step launches, whether all of them lie in
one command buffer, that every donated buffer is updated in place, that nothing as large as a
layer's KV is copied, and that no fusion of XLA's reads what a kernel that launches early has made
(`kernels_pallas/early_launch.py`). It does not autotune, so that matrix products of XLA may
be other ones on the device.

    PYTHONPATH=. python benchmarks/gpu_programs.py FOLDER --out . smollm2-135m:none:1 ...

FOLDER holds the unpacked wheels jax-cuda13-pjrt and jax-cuda13-plugin of the installed jax's
version, and nvidia-cuda-nvcc and nvidia-nvvm 13.0. A program is shape:drafter:batch, with
":prefill" behind it for one of so many tiles of a prompt, ":4" for four decode steps in one,
":tree" for drafts in trees of 32 nodes, or ":sampled", ":edited" or ":logprobs" for batches that
ask for more than the highest logit.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

_TREE_NODES = 32
_XLA = ("fusion", "copy", "copy-start", "dynamic-update-slice", "reduce", "scatter", "gather")
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 ecc_enabled: true name: "NVIDIA H200" driver_version: "13.0.0"
  runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plugin", type=Path, help="folder with the unpacked wheels")
    parser.add_argument(
        "programs", nargs="+", metavar="SHAPE:DRAFTER:BATCH[:prefill|:tree|:MODE|:STEPS]"
    )
    parser.add_argument("--out", type=Path, help="folder for gpu_programs.json")
    args = parser.parse_args()
    dump = Path(tempfile.mkdtemp())
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(
        [
            f"--xla_dump_to={dump}",
            f"--xla_gpu_cuda_data_dir={args.plugin}/nvidia/cu13",
            "--xla_gpu_autotune_level=0",
        ]
    )
    # What programs with a Mosaic kernel are linked with; jax would set it where the plugin is.
    runtime = args.plugin / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    os.environ["PATH"] = f"{args.plugin}/nvidia/cu13/bin:{os.environ['PATH']}"
    devices = _devices(args.plugin)
    rows = []
    for program in args.programs:
        for file in dump.iterdir():
            file.unlink()
        rows.append(_row(program, devices, dump))
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        results = {
            "command": "python benchmarks/gpu_programs.py FOLDER " + " ".join(args.programs),
            "device": "compiled for NVIDIA H200 without one",
            "versions": {
                "python": platform.python_version(),
                "jax": importlib.metadata.version("jax"),
            },
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        (args.out / "gpu_programs.json").write_text(json.dumps(results, indent=1) + "\n")


def _devices(plugin: Path) -> list[Any]:
    """H200s that can be compiled for."""
    from jax._src.lib import xla_client

    library = plugin / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"target_config": _TARGET, "topology": "1x1x1"}
    topology = xla_client.make_c_api_device_topology(api, "h200", **options)
    return topology._make_compile_only_devices()


def _row(program: str, devices: list[Any], dump: Path) -> dict[str, Any]:
    import jax
    from jax.sharding import AbstractMesh, SingleDeviceSharding

    shape, drafter, batch, *kind = program.split(":")
    step, args = _step(shape, drafter, int(batch), kind[0] if kind else "1")
    place = SingleDeviceSharding(devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        compiled = step.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    (before,) = dump.glob("*.thunk_sequence.txt")
    (after,) = dump.glob("*.thunk_sequence_after_thunk_passes.txt")
    launched = Counter(re.findall(r"^\s*\d+: (\w+)", before.read_text(), re.M))
    top = re.findall(r"^\d+: (\w+)", after.read_text(), re.M)
    _, state, _ = args
    kv_bytes = state.kv[0].size * state.kv[0].dtype.itemsize
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return {
        "program": program,
        "launches": sum(launched.values()),
        "kinds": dict(launched),
        "command_buffers": top.count("kCommandBuffer"),
        "outside_command_buffers": len(top) - top.count("kCommandBuffer"),
        "state_bytes": state_bytes,
        "aliased_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kv_sized_copies": _large_copies(compiled.as_text(), kv_bytes),
        **_early(compiled.as_text()),
        "arguments": len(jax.tree.leaves(args)),
    }


def _early(hlo: str) -> dict[str, int]:
    """Kernels that launch the next one early, and those of them whose result a fusion reads."""
    instructions = {
        name: (opcode, set(re.findall(r"%[\w.-]+", operands)), "launch_dependents" in rest)
        for name, opcode, operands, rest in re.findall(
            r"^\s*(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((.*?)\)(.*)$", hlo, re.M
        )
    }
    users: dict[str, list[str]] = {}
    for name, (_, operands, _) in instructions.items():
        for operand in operands:
            users.setdefault(operand, []).append(name)

    def is_read_by_xla(name: str) -> bool:
        return any(
            is_read_by_xla(user) if opcode in ("get-tuple-element", "bitcast") else opcode in _XLA
            for user in users.get(name, [])
            for opcode in [instructions[user][0]]
        )

    early = [name for name, (_, _, is_early) in instructions.items() if is_early]
    return {"early": len(early), "early_read_by_xla": sum(map(is_read_by_xla, early))}


def _large_copies(hlo: str, num_bytes: int) -> int:
    """Copies of at least so many bytes in a program of 16-bit numbers."""
    count = 0
    for dims in re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", hlo):
        size = 2
        for dim in dims.split(","):
            size *= int(dim)
        count += size >= num_bytes
    return count


def _step(name: str, drafter: str, batch: int, kind: str) -> tuple[Any, tuple[Any, ...]]:
    """A program of an engine on an H200, and its arguments by shape alone.

    kind: "prefill", "tree", a mode's name, or how many decode steps.
    """
    import jax

    from jaxspec.bench.shapes import SHAPES, plan_shape, random_target
    from jaxspec.config import EngineConfig
    from jaxspec.drafters.base import ModelParams
    from jaxspec.engine.parts import build_parts
    from jaxspec.engine.state import empty_decode_batch, empty_prefill_batch, init_state
    from jaxspec.engine.steps import build_steps
    from jaxspec.logit_edits import EditRows
    from jaxspec.mode import Mode
    from kernels_pallas.dispatch import Device

    shape, dtype = SHAPES[name], "bfloat16"
    config = EngineConfig(
        max_num_seqs=32,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        decode_steps=int(kind) if kind.isdigit() else 1,
        tree_nodes=_TREE_NODES if kind == "tree" else None,
    )
    if drafter != "none":
        forced = min(5, shape.block_size(drafter, config) - 1)
        config = dataclasses.replace(config, force_accept=forced)
    plans = []

    def make_params() -> ModelParams:
        plans.append(plan_shape(shape, drafter, config, dtype))
        return ModelParams(random_target(shape.target, dtype), plans[-1].params)

    params = jax.eval_shape(make_params)
    parts = build_parts(
        config,
        shape.target,
        plans[-1]._replace(params=params.drafter),
        params,
        dtype=dtype,
        device=Device("gpu", "NVIDIA H200", (9, 0)),
        memory_bytes=140 << 30,
    )
    geometry, target, made, *_ = parts
    mode = Mode[kind.upper()] if kind.upper() in Mode.__members__ else Mode.GREEDY
    steps = build_steps(geometry, target, made, mode=mode)
    state = jax.eval_shape(lambda: init_state(geometry, target, made))
    if mode.edits:
        size = geometry.num_slots + 1
        edits = jax.eval_shape(lambda: EditRows.neutral(size, geometry.vocab_size))
        state = state.replace(edits=edits)
    if kind == "prefill":
        return steps.prefill, (params, state, empty_prefill_batch(batch, geometry))
    packed = empty_decode_batch(batch, geometry)
    step = steps.decode if geometry.decode_steps == 1 else steps.decode_loop
    return step, (params, state, packed)


if __name__ == "__main__":
    main()
