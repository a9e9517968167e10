"""One benchmark from its settings to a folder of results."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from detgen import __version__
from detgen.bench import cells as grid
from detgen.bench.cells import Cell, Peers
from detgen.bench.figures.draw import need_matplotlib
from detgen.bench.figures.session import draw_figures
from detgen.bench.interface import BenchConfig, ModelSource, Observer, Workload
from detgen.bench.judging import judge
from detgen.bench.measuring import Outputs, Progress, cell_seconds, compare_batches, measure_cell, runs_of
from detgen.bench.processes import PeerError, Processes, call_once
from detgen.bench.results import device_name, environment, save
from detgen.bench.roofline import place_under_roof
from detgen.bench.rows import Results, Row
from detgen.bench.target import Target, resolve
from detgen.bench.workloads import SYNTHETIC, make_workload
from detgen.errors import BenchError
from detgen.show.bench_tables import write_markdown


def bench(config: BenchConfig, observer: Observer) -> Results:
    """Measure, and write bench.json and bench.md to the output folder.

    Raises:
        BenchError: settings that make no benchmark, or a folder that cannot be written.
        EngineError: a device or model that is not there.
    """
    grid.check(config)
    if config.figures:
        need_matplotlib()
    started = time.monotonic()
    observer.message("reading the models' settings")
    target = resolve(config)
    cells_, workloads = fitted_workloads(config, target)
    with tempfile.TemporaryDirectory(prefix="detgen-bench-") as scratch:
        source = _source(config, target, workloads, Path(scratch))
        peers = grid.find_peers(config, source)
        for note in peers.notes:
            observer.message(note)
        plan = [Cell(w, size, grid.settings_for(config, peers, size)) for w, size in cells_]
        plan = [cell for cell in plan if cell.settings]
        if not plan:
            raise BenchError("nothing is left to measure: no peer that was asked for runs these batch sizes")
        logs = _folder(config.output) / "logs"
        rows, roof, outputs = _measure(config, observer, source, plan, logs, started)
        judge(rows, outputs)
        notes = list(peers.notes)
        if config.figures:
            prompts = plan[0].workload.prompts
            notes += draw_figures(config, source, prompts, rows, _machine(source), observer, logs)
    for row in rows:
        if row.seconds and roof:
            place_under_roof(row, median(row.seconds), target.weights, roof, target.dtype)
    results = Results(
        environment=environment(config, source, _all_versions(peers)),
        roofline=roof,
        workloads={w.name: w.origin for w in workloads},
        rows=rows,
        notes=notes,
    )
    save(results, config.output / "bench.json")
    write_markdown(results, config.output / "bench.md")
    return results


def fitted_workloads(config: BenchConfig, target: Target) -> tuple[list[tuple[Workload, int]], list[Workload]]:
    """Each workload with each batch size, and the workloads at their largest."""
    pairs, largest = [], []
    for name in grid.workload_names(config):
        scale = config.scale or (1.0 if target.device.startswith("cuda") else 1 / 16)
        made = _sized(name, config, target, scale)
        # A scale that nobody asked for gives way to the model's context.
        gives_way = config.scale is None and name in SYNTHETIC
        while gives_way and _longest(made) > target.context and scale > grid.LEAST_SCALE:
            scale /= 2
            made = _sized(name, config, target, scale)
        if _longest(made) > target.context:
            raise BenchError(
                f"workload {name} has sequences of {_longest(made)} tokens, the model's context is "
                f"{target.context}; use a smaller --scale or fewer --max-tokens"
            )
        pairs += list(zip(made, grid.batch_sizes(config), strict=True))
        largest.append(max(made, key=lambda w: len(w.prompts)))
    return pairs, largest


def _sized(name: str, config: BenchConfig, target: Target, scale: float) -> list[Workload]:
    """A workload with the requests of each batch size."""
    return [
        make_workload(
            name,
            requests=grid.requests_at(config, size),
            max_tokens=config.max_tokens,
            scale=scale,
            seed=config.seed,
            vocabulary=target.vocabulary,
            encode=target.encode,
        )
        for size in grid.batch_sizes(config)
    ]


def _longest(made: list[Workload]) -> int:
    return max(w.longest for w in made)


def _source(config: BenchConfig, target: Target, workloads: list[Workload], scratch: Path) -> ModelSource:
    return ModelSource(
        target=config.target,
        draft=config.draft,
        random_weights=config.random_weights,
        device=target.device,
        dtype=target.dtype,
        target_quant=config.target_quant,
        draft_quant=config.draft_quant,
        threads=config.threads or _cores(),
        seed=config.seed,
        positions=_longest(workloads) + 1,
        scratch=scratch,
    )


def _cores() -> int:
    """Processors that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _folder(path: Path) -> Path:
    """The output folder, made.

    Raises:
        BenchError: if it cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write to {path}: {error.strerror}; choose another folder with -o") from None
    return path


def _measure(
    config: BenchConfig, observer: Observer, source: ModelSource, plan: list[Cell], logs: Path, started: float
) -> tuple[list[Row], dict[str, float], Outputs]:
    observer.message("measuring the machine: a copy and a matrix product")
    arguments = {"device": source.device, "dtype": source.dtype, "threads": source.threads}
    try:
        roof = call_once("detgen.bench.roofline:measure_roofline", arguments, source.threads, logs)
    except PeerError as error:
        observer.message(f"no roofline: {error}")
        roof = {}
    rows: list[Row] = []
    outputs = Outputs()
    progress = Progress(observer, sum(map(runs_of, plan)))
    with Processes(source, tuple(sorted({c.batch_size for c in plan})), logs) as processes:
        for at, cell in enumerate(plan):
            rows += measure_cell(cell, processes, config, outputs, progress, cell_seconds(config, plan, at, started))
        for cell in plan:
            for setting in cell.settings:
                compare_batches(cell, setting, processes, outputs, progress.extra)
    return rows, roof, outputs


def _machine(source: ModelSource) -> str:
    """What stands below the figures."""
    models = source.random_weights or source.target or "embedded target"
    return f"{device_name(source.device)}, {source.threads} threads, {models}, {source.dtype}; detgen {__version__}"


def _all_versions(peers: Peers) -> dict[str, str]:
    return dict(sorted(peers.versions.items()))
