"""The figures as PNG and SVG. Lines differ in markers and strokes, bars in hatches, so that no colour is needed."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = dict[str, Any]

_STROKES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
_HATCHES = ("", "///", "...", "xxx")


def need_matplotlib() -> None:
    """See that figures can be drawn, before anything is measured for them.

    Raises:
        BenchError: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise BenchError("the figures need matplotlib: pip install 'detgen[plots]'") from None
    matplotlib.use("Agg")


def draw(number: int, data: Data, folder: Path, machine: str) -> list[Path]:
    """Draw one figure.

    Args:
        number: as in the paper.
        data: what its measurement returned.
        folder: for the files.
        machine: told below the figure.

    Returns:
        The files.
    """
    from matplotlib import pyplot

    figure = _DRAWERS[number](data)
    figure.text(0.5, 0.005, machine, ha="center", va="bottom", fontsize=7, color="0.35")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    paths = [folder / f"figure-{number:02}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def _axes(columns: int, title: str, width: float = 5.0) -> tuple[Figure, list[Axes]]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, 3.8), squeeze=False)
    figure.suptitle(title, fontsize=11)
    for ax in axes[0]:
        ax.grid(True, color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure, list(axes[0])


def _lines(ax: Axes, counts: list[int], lines: dict[str, list[float]], x: str, y: str, *, log: bool = False) -> None:
    """Lines over counts that are drawn at equal ratios."""
    for (marker, stroke), (label, values) in zip(cycle(_STROKES), lines.items(), strict=False):
        ax.plot(counts, values, marker=marker, linestyle=stroke, color="black", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(n) for n in counts], rotation=45, fontsize=8)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, max(1.0, *(1.05 * value for values in lines.values() for value in values)))
    if len(lines) > 1:
        ax.legend()


def _linear_layers(data: Data) -> Figure:
    out, in_ = data["shape"]
    title = f"Cost of a row-invariant linear layer, {in_} x {out}, {data['dtype']}"
    figure, (left, right) = _axes(2, title)
    rows, invariant, plain = data["rows"], data["invariant"], data["plain"]
    layers = {"row-invariant": invariant, "plain (F.linear)": plain}
    _lines(left, rows, layers, "rows (tokens)", "time of the layer (ms)", log=True)
    ratio = {"ratio": [a / b for a, b in zip(invariant, plain, strict=True)]}
    _lines(right, rows, ratio, "rows (tokens)", "time, row-invariant over plain")
    right.axhline(1.0, linestyle=":", color="0.4")
    return figure


def _pass_costs(data: Data) -> Figure:
    figure, (left, right) = _axes(2, "What a canonical pass costs, and what windows waste (drafter ngram)")
    per_token = [ms / n for ms, n in zip(data["ms"], data["rows"], strict=True)]
    costs = {"per token": per_token, "per pass": data["ms"]}
    _lines(left, data["rows"], costs, "rows of a canonical pass", "latency (ms)", log=True)
    part = data["windows"]
    wasted = {
        f"{size} at a time": [100 * row[i] for row in part["recomputed"]] for i, size in enumerate(part["requests"])
    }
    of = "recomputed tokens (% of computed)"
    _lines(right, part["windows"], wasted, "window (drafted tokens)", of)
    return figure


def _fractions(data: Data) -> Figure:
    figure, axes = _axes(max(len(data), 1), "What drafts gain, by share of verified requests", 4.2)
    for ax, (name, drafters) in zip(axes, data.items(), strict=False):
        width = 0.8 / len(drafters)
        for i, (drafter, points) in enumerate(drafters.items()):
            places = [at + (i - (len(drafters) - 1) / 2) * width for at in range(len(points))]
            ax.bar(places, [speed for _, speed in points], width, label=drafter, hatch=_HATCHES[i % len(_HATCHES)],
                   facecolor=str(0.95 - 0.25 * i), edgecolor="black", linewidth=0.8)  # fmt: skip
            ax.set_xticks(range(len(points)), [f"{percent:g}" for percent, _ in points])
        ax.axhline(1.0, linestyle="--", color="black", linewidth=1)
        ax.set_title(name, fontsize=9)
        ax.set_xlabel("verified requests (%)")
        ax.set_ylabel("throughput over that without drafts")
        ax.legend(fontsize=8)
    return figure


def _heat_maps(data: Data) -> Figure:
    figure, axes = _axes(2, "Windows and requests per pass (drafter ngram)")
    maps = (
        ("recomputed", "recomputed tokens (% of all computed)", "{:.1f}", 100.0),
        ("speed", "throughput (output tokens/s)", "{:,.0f}", 1.0),
    )
    for ax, (key, label, pattern, factor) in zip(axes, maps, strict=True):
        values = [[factor * v for v in row] for row in data[key]]
        highest = max(max(row) for row in values) or 1.0
        ax.grid(False)
        image = ax.imshow(values, cmap="Greys", vmin=0, vmax=highest, aspect="auto", origin="lower")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                dark = value > 0.55 * highest
                ax.text(x, y, pattern.format(value), ha="center", va="center", fontsize=8,
                        color="white" if dark else "black")  # fmt: skip
        ax.set_xticks(range(len(data["requests"])), data["requests"])
        ax.set_yticks(range(len(data["windows"])), data["windows"])
        ax.set_xlabel("requests per pass")
        ax.set_ylabel("window (drafted tokens)")
        ax.set_title(label, fontsize=10)
        figure.colorbar(image, ax=ax)
    return figure


_DRAWERS = {4: _linear_layers, 9: _pass_costs, 10: _fractions, 13: _heat_maps}
