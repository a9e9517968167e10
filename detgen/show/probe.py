"""How `detgen verify-determinism --probe` shows the shape classes of a model."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from detgen.check.probe_view import ProbeView
from detgen.show.screen import open_output

_COLOURS = ("green", "yellow", "red", "magenta", "cyan", "blue")


def show_probe(found: ProbeView) -> None:
    """The grid of classes; each cell has a letter for each thread count."""
    console = open_output()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows", justify="right")
    for name in found.columns:
        table.add_column(name)
    for count in found.threads:
        table.add_column(f"ms, {count} thread{'s' if count > 1 else ''}", justify="right")
    for n in found.rows:
        letters = [[found.letters[n, count, name] for count in found.threads] for name in found.columns]
        cells = [Text(" ").join(Text(x, style=_colour(x)) for x in cell) for cell in letters]
        times = [f"{found.milliseconds[n, count]:.2f}" for count in found.threads]
        table.add_row(Text(str(n), style="bold" if n in found.canonical else "dim"), *cells, *times)
    console.print(table)
    console.print()
    threads = " and ".join(f"{n} thread{'s' if n > 1 else ''}" for n in found.threads)
    allowed = ", ".join(map(str, sorted(found.canonical)))
    console.print(
        Text(
            "Columns: the model's linear layers (inputs→outputs), attention, the whole pass and its time. "
            f"Equal letters are equal bits, with {threads}. Canonical passes may have {allowed} of these rows."
        ),
        soft_wrap=True,
    )


def _colour(letter: str) -> str:
    return _COLOURS[(ord(letter) - ord("A")) % len(_COLOURS)]
