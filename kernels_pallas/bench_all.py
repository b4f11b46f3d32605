"""Every op's bench in one process: `python -m kernels_pallas.bench_all [--out FOLDER] [OP ...]`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

from kernels_pallas import dispatch, measure


def main(argv: list[str] | None = None) -> int:
    """Runs the benches; a failure of one is reported at the end and does not stop the others.

    Returns:
      The number of benches that failed.
    """
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench_all", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops to run, by default all")
    parser.add_argument("--out", type=Path, help="folder for one JSON file an op")
    args = parser.parse_args(argv)
    device = dispatch.Device.current()
    print(f"{device.kind}, compute capability {device.compute_capability}", flush=True)
    failed = []
    for op in args.ops or dispatch.ops():
        dispatch.op_module(op)
        start = time.perf_counter()
        try:
            rows = importlib.import_module(f"kernels_pallas.{op}.bench").bench()
        except Exception:
            # Time on the device is scarce: the other benches still run, and the exit status tells.
            traceback.print_exc()
            failed.append(op)
            continue
        print(f"\n{op} ({time.perf_counter() - start:.0f} s)\n{measure.table(rows)}", flush=True)
        if args.out is not None:
            measure.write_results(args.out, op, rows)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
