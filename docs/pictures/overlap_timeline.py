"""Draws `overlap_timeline.png` from a run: what host and device do, with and without overlap.

Random weights of a named shape: only times are looked at. On a machine where much else runs, the
fastest of several recordings shows what the engine does and not what the others do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.bench.settings import SHAPE_NAMES
from jaxspec.bench.shape_rig import ShapeRig
from jaxspec.bench.shapes import SHAPES, random_target
from jaxspec.config import EngineConfig
from jaxspec.engine.assemble import choose_dtype
from jaxspec.pictures.picture import made_on
from jaxspec.pictures.record_timeline import Timeline, Watch, record_engine
from jaxspec.pictures.timeline import timeline_picture
from kernels_pallas.dispatch import Device

_PROMPT_LEN, _MAX_LEN = 64, 1024


def main() -> None:
    """Records and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="smollm2-135m")
    parser.add_argument("--drafter", choices=("none", "dflash"), default="none")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5, help="recordings; the fastest is drawn")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    dtype, _ = choose_dtype("auto", Device.current())
    shape = SHAPES[args.shape]
    rig = ShapeRig(
        EngineConfig(max_num_seqs=args.batch, max_model_len=_MAX_LEN, decode_steps=1),
        shape,
        random_target(shape.target, dtype),
        drafter=args.drafter,
        dtype=dtype,
        batches=(args.batch,),
        split=False,
    )
    timelines = {
        name: min(
            (_record(rig, args, overlap=overlap) for _ in range(args.repeats)),
            key=lambda timeline: timeline.step_ms,
        )
        for name, overlap in {"no overlap": False, "overlap": True}.items()
    }
    how = "plain decoding" if args.drafter == "none" else args.drafter
    title = f"sizes of {args.shape}, {how}, batch {args.batch}, {dtype}; {made_on()}"
    timeline_picture(timelines, title).save(args.out)
    for name, timeline in timelines.items():
        print(f"{name}: {timeline.step_ms:.3f} ms a step, device {timeline.device_share:.0%} busy")


def _record(rig: ShapeRig, args: argparse.Namespace, *, overlap: bool) -> Timeline:
    watch = Watch(rig.step)
    engine = rig.engine(watch, overlap=overlap)
    for request in rig.requests(args.batch, _PROMPT_LEN, _MAX_LEN - _PROMPT_LEN):
        engine.add_request(request)
    return record_engine(engine, watch, num_requests=args.batch, num_steps=args.num_steps)


if __name__ == "__main__":
    main()
