"""All figures of one benchmark: measured in a process of their own, drawn here, their data kept beside them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from detgen.bench.cells import MIXED
from detgen.bench.figures import measure
from detgen.bench.figures.draw import draw
from detgen.bench.interface import BenchConfig, ModelSource, Prompt
from detgen.bench.processes import start_worker
from detgen.bench.results import Row
from detgen.progress import Observer
from detgen.worker import WorkerError


def make_figures(
    config: BenchConfig,
    source: ModelSource,
    prompts: tuple[Prompt, ...],
    rows: list[Row],
    environment: dict[str, Any],
    observer: Observer,
    logs: Path,
) -> list[str]:
    """Measure and draw figures 4, 6, 9, 10 and 13 into the folder `figures` of the output.

    A figure that fails is left out.

    Args:
        config: the benchmark's; `full` measures more points.
        source: the models.
        prompts: of the first workload.
        rows: that figure 10 is drawn from.
        environment: told below the figures.
        observer: told which figure is measured.
        logs: for the process's log.

    Returns:
        What was left out, and why.
    """
    folder = config.output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [1, 2, 4, 8, 16] if config.full else [1, 4, 16]
    lengths = [2, 4, 8, 16, 32, 64] if config.full else [2, 4, 8, 16]
    repeats = 5 if config.full else 2
    some = (prompts * -(-max(sizes) // len(prompts)))[: max(len(prompts), max(sizes))]
    measurements: tuple[tuple[int, Any, tuple[Any, ...]], ...] = (
        (4, measure.linear_layers, (5 * repeats,)),
        (6, measure.consistent_spans, (some, max(sizes))),
        (13, measure.windows, (some, lengths, sizes, repeats)),
        (9, measure.pass_costs, (5 * repeats,)),
    )
    found: dict[int, Any] = {10: by_fraction(rows)}
    notes = []
    with start_worker("figures", source.threads, logs) as worker:
        for number, function, arguments in measurements:
            observer.message(f"figure {number}: {function.__name__.replace('_', ' ')}")
            try:
                found[number] = worker.call(function, source, *arguments)
            except WorkerError as error:
                notes.append(f"figure {number} left out: {error}")
    if 9 in found:  # its right half is another view of figure 13
        found[9]["windows"] = found.get(13)
    machine = "{device}, {threads} threads, {models[target]}, {models[dtype]}; detgen {detgen}".format(**environment)
    for number, data in sorted(found.items()):
        (folder / f"figure-{number:02}.json").write_text(json.dumps(data, indent=1) + "\n")
        draw(number, data, folder, machine)
    return notes


def by_fraction(rows: list[Row]) -> dict[str, Any]:
    """Figure 10: throughput over the share of verified requests, normalised to no verification at all.

    Returns:
        for each workload and drafter the pairs (percent verified, speed over the fast path's in the same rounds).
    """
    found: dict[str, Any] = {}
    for row in rows:
        drafter = row.label.split(",")[0].removeprefix("detgen ")
        if row.peer == "detgen" and drafter in MIXED and row.over_fast and row.fraction:
            place = found.setdefault(f"{row.workload}, batch {row.batch_size}", {})
            place.setdefault(drafter, []).append([100 * row.fraction, median(row.over_fast)])
    return {name: {d: sorted(points) for d, points in drafters.items()} for name, drafters in found.items()}
