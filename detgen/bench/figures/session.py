"""All figures of one benchmark: measured in a child process, drawn here, their data kept beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detgen.bench.figures.draw import draw
from detgen.bench.figures.fractions import by_fraction
from detgen.bench.interface import BenchConfig, ModelSource, Observer, Prompt
from detgen.bench.processes import Child, PeerError
from detgen.bench.rows import Row

_MODULE = "detgen.bench.figures.measure"


def draw_figures(
    config: BenchConfig,
    source: ModelSource,
    prompts: tuple[Prompt, ...],
    rows: list[Row],
    machine: str,
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
        machine: stands below the figures.
        observer: told which figure is measured.
        logs: for the child's log.

    Returns:
        What was left out, and why.
    """
    folder = config.output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [1, 2, 4, 8, 16] if config.full else [1, 4, 16]
    lengths = [2, 4, 8, 16, 32, 64] if config.full else [2, 4, 8, 16]
    repeats = 5 if config.full else 2
    prompts = (prompts * -(-max(sizes) // len(prompts)))[: max(len(prompts), max(sizes))]
    child = Child("figures", {"OMP_NUM_THREADS": str(source.threads)}, logs)

    def ask(function: str, **arguments: Any) -> Any:
        return child.ask("call", f"{_MODULE}:{function}", {"source": source, **arguments})

    found: dict[int, Any] = {10: by_fraction(rows)} if rows else {}
    notes = []
    try:
        for number, what in ((4, "linear layers"), (6, "consistent spans"), (13, "windows"), (9, "passes")):
            observer.message(f"figure {number}: {what}")
            try:
                if number == 4:
                    found[4] = ask("linear_layers", repeats=5 * repeats)
                elif number == 6:
                    found[6] = ask("consistent_spans", prompts=prompts, batch_size=max(sizes))
                elif number == 13:
                    found[13] = ask(
                        "windows", prompts=prompts, window_lengths=lengths, batch_sizes=sizes, repeats=repeats
                    )
                elif 13 in found:
                    found[9] = ask("pass_costs", repeats=5 * repeats) | {"windows": found[13]}
            except PeerError as error:
                notes.append(f"figure {number} left out: {error}")
    finally:
        child.close()
    for number, data in sorted(found.items()):
        (folder / f"figure-{number:02}.json").write_text(json.dumps(data, indent=1) + "\n")
        draw(number, data, folder, machine)
    return notes
