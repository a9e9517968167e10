"""`detgen bench`: what determinism costs here, compared with what people would use instead.

`detgen.bench` measures, `detgen.show` shows the results; both are imported inside the command, since they import the
engine and rich, which `--help` does not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.bench.config import BenchConfig
from detgen.cli.answering import named
from detgen.cli.declared import DONE, INTERRUPTED, command, epilog

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = "\n\n".join(
    (
        "Workloads: sample (the embedded prompts), chats (each of them as a chat), file:PATH (prompts or chats), and"
        " random prompts: long-prompts (1,024 tokens in, 16 out), long-answers (32 in, 512 out), 1024x256, 1024x1024,"
        " 4096x1024 (tokens in x out), sharegpt and arxiv (mixed lengths).",
        epilog(
            "detgen bench",
            "detgen bench --workload file:prompts.jsonl --target models/large --draft models/small",
            "detgen bench --random-weights llama-3.2-1b --synthetic-acceptance 0.6,0.8 --batch-size 4",
            "detgen bench --peer detgen --peer openvino --peer-python openvino=venvs/openvino/bin/python",
            "detgen bench -o after --compare before/bench.json",
            status="0 measured (rows may have failed), 2 refused",
        ),
    )
)


@command
def bench_command(
    config: BenchConfig,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json", show_default=False, help="Report what has changed beyond noise since this bench.json."
        ),
    ] = None,
    *,
    display: QuietDisplay,
) -> int:
    """Measure detgen on this machine, beside transformers and whatever else is installed.

    Peers take turns on the same prompts; outputs are compared while they run. After each round, what was measured so
    far is in bench.json; Ctrl-C ends the benchmark and shows it.
    """
    from detgen.bench.bench_results import Stopped, load
    from detgen.bench.benchmark import bench

    named(config.output)
    status = DONE
    try:
        with display:
            old = load(compare) if compare else None
            results = bench(config, display)
    except Stopped as stopped:
        results, status = stopped.results, INTERRUPTED
        display.notice("interrupted; what was measured so far is kept")
    except KeyboardInterrupt:
        display.notice("interrupted before anything was measured; nothing was kept")
        return INTERRUPTED
    from detgen.show.bench_view import show

    show(results, old, config.output, quiet=display.quiet)
    return status


COMMANDS = {"bench": (bench_command, EPILOG)}
