"""Measures and draws the figures of the paper that detgen follows: 4, 9 and 13, and 10 from a benchmark's rows.

    .venv/bin/python benchmarks/figures                                       # the embedded model, into figures-out
    .venv/bin/python benchmarks/figures --bench bench-out/bench.json --full   # more points, and figure 10

Figure 10 needs a benchmark of several shares of verified requests: `detgen bench --full --peer detgen`.
Each figure is written as PNG and SVG, with its data as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import measure
from figures.draw import draw, need_matplotlib

from detgen.bench.bench_results import Row, describe, load
from detgen.bench.cells import MIXED
from detgen.bench.config import BenchConfig
from detgen.bench.correctness import REFERENCE
from detgen.bench.model_source import resolve
from detgen.bench.peer_interface import ModelSource
from detgen.bench.peers.detgen_engine import DetgenPeer
from detgen.bench.workloads import make_workload
from detgen.engine.config import EngineConfig
from detgen.progress import Unobserved

_MOST_REQUESTS = 16  # at a time in any figure


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model folder; the embedded model if it is left out")
    parser.add_argument("--bench", type=Path, help="bench.json that figure 10 is drawn from")
    parser.add_argument("--full", action="store_true", help="measure more points")
    parser.add_argument("-o", "--output", type=Path, default=Path("figures-out"))
    given = parser.parse_args()
    need_matplotlib()
    config = BenchConfig(engine=EngineConfig(target=given.target))
    target = resolve(config, Unobserved())
    workload = make_workload("sample", _MOST_REQUESTS, 1.0, config, target)
    with tempfile.TemporaryDirectory(prefix="detgen-figures-") as scratch:
        source = ModelSource(
            target.engine, None, config.seed, workload.longest + 1, Path(scratch), target.native, target.as_stored
        )
        found = measured(source, workload.prompts, full=given.full)
        if given.bench is not None:
            found[10] = by_fraction(load(given.bench).rows)
        environment = describe(config, source, {})
    given.output.mkdir(parents=True, exist_ok=True)
    machine = "{device}, {threads} threads, {models[target]}, {models[dtype]}; detgen {detgen}".format(**environment)
    for number, data in sorted(found.items()):
        (given.output / f"figure-{number:02}.json").write_text(json.dumps(data, indent=1) + "\n")
        print(*draw(number, data, given.output, machine), sep="\n")


def measured(source: ModelSource, prompts: tuple[Any, ...], *, full: bool) -> dict[int, Any]:
    """The data of figures 4, 9 and 13, by their numbers."""
    sizes = [1, 2, 4, 8, _MOST_REQUESTS] if full else [1, 4, _MOST_REQUESTS]
    lengths = [2, 4, 8, 16, 32, 64] if full else [2, 4, 8, 16]
    repeats = 5 if full else 2
    peer = DetgenPeer(source, DetgenPeer.contenders(source)[0], tuple(sizes))
    windows = measure.windows(peer, prompts, lengths, sizes, repeats)
    costs = measure.pass_costs(peer, 5 * repeats)
    # The right half of figure 9 is another view of figure 13.
    return {4: measure.linear_layers(peer, 5 * repeats), 9: costs | {"windows": windows}, 13: windows}


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


if __name__ == "__main__":
    main()
