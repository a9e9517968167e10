"""Runs a benchmark, from its settings to a folder of results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path

from detgen.bench.bench_results import Results, Row, Stopped, describe, save
from detgen.bench.cells import check, find_peers, fitted_workloads, make_cells, pythons
from detgen.bench.config import BenchConfig
from detgen.bench.measuring import Measuring, Outputs, judge
from detgen.bench.model_source import resolve
from detgen.bench.noise_levels import busy_cells, busy_now
from detgen.bench.peer_interface import ModelSource
from detgen.bench.processes import Processes, start_worker
from detgen.bench.processor_time import OthersClock
from detgen.bench.roofline import Roof, measure_roof, place_all
from detgen.engine.sources import check_sources
from detgen.errors import BenchError
from detgen.progress import Observer
from detgen.worker import WorkerError

_QUICK_SECONDS = 140.0  # for the quick grid; the full one is not limited


def bench(config: BenchConfig, observer: Observer) -> Results:
    """Measure, and write bench.json to the output folder.

    The file is written anew after each round of a cell, with everything measured so far.

    Raises:
        BenchError: if the settings make no benchmark, or the folder cannot be written.
        EngineError: if a device or model does not exist.
        Stopped: on Ctrl-C or SIGTERM after something was measured.
    """
    kept: list[Results] = []
    try:
        return _measure(config, observer, kept.append)
    except KeyboardInterrupt:
        if not kept:
            raise
        raise Stopped(kept[-1]) from None


def _measure(config: BenchConfig, observer: Observer, kept: Callable[[Results], None]) -> Results:
    """See `bench`; `kept` receives the results whenever they are written."""
    check(config)
    if config.random_weights is None:
        check_sources(config.engine, observer)
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
        peers, notes, packages = find_peers(config, source)
        notes += busy_now(before := others.read())
        for note in notes:
            observer.message(note)
        cells = make_cells(config, workloads, peers)
        environment = describe(config, source, packages) | {"others_before": before and before.share}
        roof = _roof(source, observer, logs)

        def keep(rows: list[Row], outputs: Outputs, *unfinished: str) -> Results:
            rows = deepcopy(rows)  # the next round adds to them
            judge(rows, outputs)
            bounds, refused = place_all(rows, target.weights, roof, target.engine.dtype)
            all_notes = [*notes, *refused, *busy_cells(rows), *unfinished]
            origins = {w.name: w.origin for w in workloads}
            results = Results(environment, bounds, origins, rows, all_notes, complete=not unfinished)
            save(results, config.output / "bench.json")
            kept(results)
            return results

        def keep_round(rows: list[Row], outputs: Outputs) -> None:
            keep(rows, outputs, _unfinished(rows, len(cells)))

        sizes = tuple(sorted({cell.batch_size for cell in cells}))
        with closing(Processes(source, sizes, logs, pythons(config))) as processes:
            seconds = max(until - time.monotonic(), 0.0)
            rows, outputs = Measuring(cells, processes, observer, config.rounds, seconds, keep=keep_round).run()
            results = keep(rows, outputs)
            for note in busy_cells(rows):
                observer.message(note)
    return results


def _unfinished(rows: list[Row], cells: int) -> str:
    """Return a note that a benchmark is not finished, and how far it has come."""
    of = list(dict.fromkeys((row.workload, row.batch_size) for row in rows))
    rounds = max((len(row.seconds) for row in rows if (row.workload, row.batch_size) == of[-1]), default=0)
    last = "{}, batch {}".format(*of[-1])
    return f"not finished: {len(of)} of {cells} cells, the last one ({last}) after round {rounds}"


def _logs(output: Path) -> Path:
    """Create the folder for the processes' logs in the output folder.

    Raises:
        BenchError: if it cannot be created.
    """
    logs = output / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write to {output}: {error.strerror}; choose another folder with -o") from None
    return logs


def _roof(source: ModelSource, observer: Observer, logs: Path) -> Roof:
    """Measure the limits of the machine; empty if that fails."""
    observer.message("measuring the machine: a copy and a matrix product")
    engine = source.engine
    try:
        with start_worker("measure_roofline", source.threads, logs) as worker:
            roof: Roof = worker.call(measure_roof, engine.device, engine.dtype, source.threads)
    except WorkerError as error:
        observer.message(f"no roofline: {error}")
        return {}
    return roof
