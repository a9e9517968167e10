"""One benchmark from its settings to a folder of results."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from detgen.bench.busy import busy_cells, busy_now
from detgen.bench.cells import check, find_peers, fitted_workloads, make_cells
from detgen.bench.figures.draw import need_matplotlib
from detgen.bench.figures.make import MOST_REQUESTS, draw_figures, measure_figures
from detgen.bench.interface import BenchConfig, ModelSource
from detgen.bench.judging import judge
from detgen.bench.measuring import Measuring
from detgen.bench.models import resolve
from detgen.bench.processes import Processes, start_worker
from detgen.bench.processor_time import OthersClock
from detgen.bench.results import Results, describe, save
from detgen.bench.roofline import Roof, measure_roof, place_under_roof
from detgen.engine.sources import check_sources
from detgen.errors import BenchError
from detgen.progress import Observer
from detgen.worker import WorkerError

_QUICK_SECONDS = 140.0  # for the quick grid; the full one takes as long as its rounds take


def bench(config: BenchConfig, observer: Observer) -> Results:
    """Measure, and write bench.json to the output folder, and the figures where they are wanted.

    Raises:
        BenchError: settings that make no benchmark, or a folder that cannot be written.
        EngineError: a device or model that is not there.
    """
    check(config)
    if config.random_weights is None:
        check_sources(config.engine, observer)
    if config.figures:
        need_matplotlib()
    others = OthersClock()
    until = time.monotonic() + (float("inf") if config.full else _QUICK_SECONDS)
    logs = _logs(config.output)
    observer.stage("loading PyTorch and the models' settings")
    target = resolve(config, observer)
    workloads = fitted_workloads(config, target)
    with tempfile.TemporaryDirectory(prefix="detgen-bench-") as scratch:
        positions = max(w.longest for w in workloads) + 1
        models = target.engine, config.random_weights, config.seed
        source = ModelSource(*models, positions, Path(scratch), target.native, target.as_stored)
        peers, notes = find_peers(config, source)
        notes += busy_now(before := others.read())
        for note in notes:
            observer.message(note)
        cells = make_cells(config, workloads, peers)
        roof = _roof(source, observer, logs)
        sizes = {cell.batch_size for cell in cells} | ({MOST_REQUESTS} if config.figures else set())
        with closing(Processes(source, tuple(sorted(sizes)), logs)) as processes:
            seconds = max(until - time.monotonic(), 0.0)
            rows, outputs = Measuring(cells, processes, observer, config.rounds, seconds).run()
            judge(rows, outputs)
            for note in (busy := busy_cells(rows)):
                observer.message(note)
            notes += busy
            if config.figures:
                of_first = [cell for cell in cells if cell.workload.name == cells[0].workload.name]
                largest = max(of_first, key=lambda cell: cell.batch_size)
                figures, missing = measure_figures(source, largest, outputs, rows, processes, observer, config.full)
                notes += missing
        environment = describe(config, source, peers) | {"others_before": before and before.share}
    if config.figures:
        draw_figures(figures, config.output / "figures", environment)
    for row in rows:
        if row.seconds and roof:
            place_under_roof(row, median(row.seconds), target.weights, roof, target.engine.dtype)
    results = Results(environment, roof, {w.name: w.origin for w in workloads}, rows, notes)
    save(results, config.output / "bench.json")
    return results


def _logs(output: Path) -> Path:
    """The folder for the processes' logs, in the output folder, both made.

    Raises:
        BenchError: if they cannot be.
    """
    logs = output / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write to {output}: {error.strerror}; choose another folder with -o") from None
    return logs


def _roof(source: ModelSource, observer: Observer, logs: Path) -> Roof:
    """What the machine can do; nothing where that cannot be measured."""
    observer.message("measuring the machine: a copy and a matrix product")
    engine = source.engine
    try:
        with start_worker("measure_roofline", source.threads, logs) as worker:
            roof: Roof = worker.call(measure_roof, engine.device, engine.dtype, source.threads)
    except WorkerError as error:
        observer.message(f"no roofline: {error}")
        return {}
    return roof
