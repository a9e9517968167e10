"""Measures detgen on a GPU, in one program: its kernels, passes, generations, checks.

    python benchmarks/gpu_suite.py                        # everything, within 9 minutes
    python benchmarks/gpu_suite.py --stage kernels --stage passes --minutes 3
    python benchmarks/gpu_suite.py --list                 # the stages, the most decisive first
    python benchmarks/gpu_suite.py --tiny                 # all stages on the CPU, with small shapes: tries this program

It needs torch and this checkout, but no network; detgen need not be installed. A stage is skipped if one of its
packages is missing. Each stage runs in a process of its own and is stopped at its limit. After each, `gpu_suite.json`
and its summary, `gpu_suite.txt`, are written to `benchmarks/results/<device>/`, or to `-o DIR`; results of earlier runs
stay until their stage runs again. The summary is printed, too.

Exit status: 0 all done, 1 a stage failed or was stopped (the others ran), 2 no CUDA device or wrong usage, 130
interrupted.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent)]  # if detgen is not installed

from gpu.running import Suite, SuiteError, device_name  # noqa: E402
from gpu.stages import STAGES  # noqa: E402

from detgen.bench.random_weights import settings_of  # noqa: E402
from detgen.errors import BenchError  # noqa: E402


def folder_of(device: str) -> Path:
    """Return the folder for the results of a device."""
    return _HERE / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main(arguments: list[str] | None = None) -> int:
    """Run the stages asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, metavar="NAME", help="run only this one; repeatable")
    parser.add_argument("--list", action="store_true", help="list the stages, their limits and what they measure")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, kernels in Triton's interpreter")
    model = (
        "configuration whose shapes are measured, as of detgen bench (default: that of each stage, with --tiny tiny)"
    )
    parser.add_argument("--random-weights", metavar="NAME", help=model)
    share = "for all stages together; each has its share (default: the sum that --list shows)"
    parser.add_argument("--minutes", type=float, metavar="M", help=share)
    parser.add_argument("--output", "-o", type=Path, metavar="DIR", help="folder of the results")
    args = parser.parse_args(arguments)
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        parser.error("argument --minutes: not a number of minutes that is more than 0")
    stages = [stage for stage in STAGES if args.stage is None or stage.name in args.stage]
    if args.list:
        for stage in stages:
            print(f"{stage.name:<17}{stage.seconds:>4} s  {stage.title}")
        print(f"{'together':<17}{sum(stage.seconds for stage in stages):>4} s")
        return 0
    minutes = args.minutes or sum(stage.seconds for stage in stages) / 60
    try:
        model = args.random_weights or ("tiny" if args.tiny else None)
        if model is not None:
            settings_of(model)
        device = "tiny" if args.tiny else device_name()
        folder = args.output or (Path("gpu-suite-out") if args.tiny else folder_of(device))
        suite = Suite(folder, device, model, tiny=args.tiny)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, suite.interrupt)
        well = suite.run(stages, minutes)
    except (SuiteError, BenchError, OSError) as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu_suite: interrupted; what was measured is kept", file=sys.stderr)
        return 130
    print(f"written to {folder / 'gpu_suite.json'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
