"""All figures of one benchmark: from what it measured, and from further measurements."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from detgen.bench.bench_results import Row
from detgen.bench.cells import MIXED, Cell
from detgen.bench.correctness import REFERENCE
from detgen.bench.figures import measure
from detgen.bench.figures.draw import draw
from detgen.bench.peer_interface import ModelSource
from detgen.bench.peers.detgen_engine import DetgenPeer
from detgen.bench.processes import Processes
from detgen.progress import Observer
from detgen.worker import WorkerError

MOST_REQUESTS = 16  # at a time in any figure


def measure_figures(
    source: ModelSource,
    cell: Cell,
    rows: list[Row],
    running: Processes,
    observer: Observer,
    full: bool,
) -> tuple[dict[int, Any], list[str]]:
    """Take figures 4, 9, 10 and 13; one that fails is left out.

    Args:
        source: the models.
        cell: whose prompts the figures are of.
        rows: of all cells, for figure 10.
        running: detgen's process measures the others.
        observer: told which figure is measured.
        full: measure more points.

    Returns:
        The figures' data by number, and what was left out and why.
    """
    detgen = DetgenPeer.contenders(source)[0]
    sizes = [1, 2, 4, 8, MOST_REQUESTS] if full else [1, 4, MOST_REQUESTS]
    lengths = [2, 4, 8, 16, 32, 64] if full else [2, 4, 8, 16]
    repeats = 5 if full else 2
    prompts = cell.workload.prompts
    prompts = (prompts * -(-max(sizes) // len(prompts)))[: max(len(prompts), max(sizes))]
    measurements: tuple[tuple[int, Any, tuple[Any, ...]], ...] = (
        (4, measure.linear_layers, (5 * repeats,)),
        (13, measure.windows, (prompts, lengths, sizes, repeats)),
        (9, measure.pass_costs, (5 * repeats,)),
    )
    found: dict[int, Any] = {10: by_fraction(rows)}
    notes = [] if found[10] else ["figure 10 left out: detgen was not measured"]
    for number, function, arguments in measurements:
        observer.message(f"figure {number}: {function.__name__.replace('_', ' ')}")
        try:
            found[number] = running.call(detgen, function, *arguments)
        except WorkerError as error:
            notes.append(f"figure {number} left out: {error}")
    if 9 in found:  # its right half is another view of figure 13
        found[9] = found[9] | {"windows": found[13]} if 13 in found else None
    return {number: data for number, data in sorted(found.items()) if data}, notes


def draw_figures(found: dict[int, Any], folder: Path, environment: dict[str, Any]) -> None:
    """Draw figures into a folder, their data beside them; the environment is told below each."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = "{device}, {threads} threads, {models[target]}, {models[dtype]}; detgen {detgen}".format(**environment)
    for number, data in found.items():
        (folder / f"figure-{number:02}.json").write_text(json.dumps(data, indent=1) + "\n")
        draw(number, data, folder, machine)


def by_fraction(rows: list[Row]) -> dict[str, Any]:
    """Figure 10: throughput over the share of verified requests, normalised to `none` on all of them.

    Returns:
        for each workload and drafter the pairs (percent verified, speed over that of `none` in the same rounds).
    """
    found: dict[str, Any] = {}
    for row in rows:
        drafter = row.label.split(",")[0].removeprefix("detgen ")
        if row.reference == REFERENCE and row.peer == "detgen" and drafter in MIXED and row.over_none and row.fraction:
            place = found.setdefault(f"{row.workload}, batch {row.batch_size}", {})
            place.setdefault(drafter, []).append([100 * row.fraction, median(row.over_none)])
    return {name: {d: sorted(points) for d, points in drafters.items()} for name, drafters in found.items()}
