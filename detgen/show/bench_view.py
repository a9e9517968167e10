"""The results of a benchmark as tables, on the terminal and as Markdown: the fastest row of a cell first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from detgen.bench.bench_results import Results, Row
from detgen.bench.noise_levels import compare
from detgen.show.screen import open_output, plain

_PIPED_WIDTH = 160  # characters per line without a terminal
_NOTE = (
    "Speeds are medians of interleaved rounds, with the lowest and highest round in brackets; ratios are medians of"
    " ratios within a round. All prompts of a cell are submitted at once, so times to the first token include waiting"
    " for a slot. Every prompt gets its number of tokens, end-of-sequence tokens included. Greedy unless the"
    " workload has a temperature. Loading is left out;"
    " memory is the peak of the peer's process while it ran the row, CPU seconds are of all its threads and processes"
    " during the wall time. Weights kept in 16 bits are widened when they are read, which changes no result. Bandwidth"
    " counts the weights once per pass."
)
_FEWER_BITS = (
    "fewer bits: weights, arithmetic or cache have fewer bits than the stored model, which makes it another model; the"
    " precision says which"
)
_SYNTHETIC = (
    "synthetic rows: the drafter knows the continuation and is right at the rate in the row's name, at a draft model's"
    " cost; fewer tokens are accepted, since none after a wrong one counts"
)


def _speed(row: Row) -> str:
    return "failed" if row.error else span(row.speeds, "{:,.0f}")


def _total(row: Row) -> str:
    if not row.seconds:
        return "-"
    return f"{median(row.speeds) * (row.prompt_tokens + row.output_tokens) / row.output_tokens:,.0f}"


def _pair(values: list[tuple[float, float]], unit: float) -> str:
    return " / ".join(f"{median(v) / unit:.3g}" for v in zip(*values, strict=True)) or "-"


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else "-"


def _recomputed(row: Row) -> str:
    c = row.counts
    if not c.get("drafted"):
        return "-"
    wasted = c["drafted"] - c["accepted"]
    return f"{wasted} ({wasted / (wasted + row.output_tokens):.0%})"


def _gib(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**30:.2f}"


_Columns = dict[str, Callable[[Row], str]]
_LABEL: _Columns = {
    "setting": lambda r: f"{r.label}{' (fewer bits)' if r.fewer_bits else ''}{' (WRONG)' if r.wrong else ''}"
}
_SPEED: _Columns = {
    **_LABEL,
    "precision": lambda r: r.precision,
    "output tokens/s": _speed,
    "total tokens/s": _total,
    "x none": lambda r: span(r.over_none, "{:.2f}"),
    "x transformers": lambda r: span(r.over_transformers, "{:.2f}"),
    "first token p50 / p99, s": lambda r: _pair(r.ttft, 1.0),
    "per token p50 / p99, ms": lambda r: _pair(r.tpot, 1e-3),
    "same bytes": lambda r: r.verdict,
}
_COST: _Columns = {
    **_LABEL,
    "wall, s": lambda r: span(r.seconds, "{:.3g}"),
    "CPU, s": lambda r: span(r.cpu_seconds, "{:.3g}"),
    "weights kept in": lambda r: r.weights or "-",
    "memory, GiB": lambda r: _gib(r.memory),
    "GPU memory, GiB": lambda r: _gib(r.gpu_memory),
    "of bandwidth": lambda r: "-" if r.bandwidth_share is None else f"{r.bandwidth_share:.0%}",
    "of arithmetic": lambda r: "-" if r.arithmetic_share is None else f"{r.arithmetic_share:.1%}",
}
_WORK: _Columns = {
    **_LABEL,
    "tokens per pass": lambda r: f"{r.output_tokens / r.passes:.2f}" if r.passes else "-",
    "accepted": lambda r: _share(r.counts.get("accepted"), r.counts.get("drafted")),
    "roll-backs": lambda r: f"{r.counts['corrected']}" if r.counts.get("drafted") else "-",
    "recomputed tokens": _recomputed,
    "as drafter none": lambda r: "-" if r.agreement is None else "{} of {}".format(*r.agreement),
}


class CellTables(NamedTuple):
    """The heading, tables and remarks of a cell.

    Attributes:
        heading: its workload and batch size.
        tables: each a list of rows of texts, the first of which has the headings.
        remarks: errors of rows, and why some could not be measured.
    """

    heading: str
    tables: list[list[list[str]]]
    remarks: list[str]


def span(values: list[float], pattern: str) -> str:
    """Return values such as `310 [305, 322]`: the median, the lowest and the highest."""
    if not values:
        return "-"
    middle, low, high = (pattern.format(f(values)) for f in (median, min, max))
    return f"{middle} [{low}, {high}]" if len(values) > 1 else middle


def cells(results: Results) -> Iterator[CellTables]:
    """Yield cells in the order in which they were measured, their rows by speed, failed ones last."""
    for workload, size in dict.fromkeys((r.workload, r.batch_size) for r in results.rows):
        rows = [r for r in results.rows if (r.workload, r.batch_size) == (workload, size)]
        rows.sort(key=lambda r: -median(r.speeds) if r.seconds else 0.0)
        heading = (
            f"{workload}, batch {size}: {rows[0].requests} requests, {rows[0].prompt_tokens:,} tokens in,"
            f" {rows[0].output_tokens:,} out"
        )
        wrong = [f"WRONG {row.label}: {row.wrong}" for row in rows if row.wrong]
        failed = [f"FAILED {row.label}: {row.error}" for row in rows if row.error]
        yield CellTables(heading, [t for c in (_SPEED, _COST, _WORK) if (t := _table(c, rows))], wrong + failed)


def _table(columns: _Columns, rows: list[Row]) -> list[list[str]]:
    """Return the columns and rows that are not empty, below the headings; empty if there are none."""
    texts = [[value(r) for value in columns.values()] for r in rows]
    texts = [text for text in texts if any(value != "-" for value in text[1:])]
    keep = [i for i in range(len(columns)) if i == 0 or any(text[i] != "-" for text in texts)]
    return [[text[i] for i in keep] for text in (list(columns), *texts)] if texts else []


def show(results: Results, old: Results | None, folder: Path, *, quiet: bool = False) -> None:
    """Write bench.md to the output folder; print the tables and the changes since an older benchmark.

    Args:
        results: the results.
        old: the older results, if any.
        folder: for bench.md.
        quiet: print only the changes.
    """
    write_markdown(results, folder / "bench.md")
    console = open_output(_PIPED_WIDTH)
    if not quiet:
        console.print(render(results))
    if old is not None:
        lines = compare(old, results) or (
            [] if quiet else [f"no change beyond noise since {old.environment['created']}"]
        )
        for line in lines:
            console.say(line)
    if not quiet:
        console.say(f"written: {folder}/bench.json, {folder}/bench.md")


def render(results: Results) -> RenderableType:
    """Return the tables for a terminal."""
    parts: list[RenderableType] = []
    for heading, tables, remarks in cells(results):
        parts.append(Text(f"\n{plain(heading)}", style="bold"))
        for headings, *texts in tables:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for i, name in enumerate(headings):
                table.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=not i)
            for text in texts:
                table.add_row(*(Text(plain(value)) for value in text))
            parts += [table, Text("")]
        parts += [Text(plain(line), style="red") for line in remarks]
    return Group(*parts, *(Text(plain(line), style="dim") for line in (_roof(results), *_notes(results))))


def write_markdown(results: Results, path: Path) -> None:
    """Write bench.md."""
    path.write_text("\n".join(_markdown(results)) + "\n", encoding="utf-8")


def _markdown(results: Results) -> Iterator[str]:
    env = results.environment
    models = env["models"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    yield f"# detgen bench: {models['target']}"
    yield ""
    yield f"{env['device']}, {env['threads']} threads, {models['dtype']}; detgen {env['detgen']}, {versions}."
    yield f"{_roof(results)}. {env['created']}."
    for heading, tables, remarks in cells(results):
        yield f"\n## {heading}"
        for headings, *texts in tables:
            yield "\n| " + " | ".join(headings) + " |"
            yield "| --- |" + " ---: |" * (len(headings) - 1)
            yield from ("| " + " | ".join(value.replace("|", "\\|") for value in text) + " |" for text in texts)
        yield from (f"\n**{line}**" for line in remarks)
    yield ""
    yield from (f"- {note}" for note in _notes(results))
    yield from (f"- workload {name}: {origin}" for name, origin in results.workloads.items())
    yield f"\n{_NOTE}"


def _roof(results: Results) -> str:
    """Describe the machine's bounds."""
    if not results.roofline:
        return "the machine's bandwidth and arithmetic are unknown"
    said = {"copy_bytes": "a copy moves {:,.1f} GB/s", "product_operations": "a product {:,.0f} GFLOP/s"}
    parts = [text.format(results.roofline[key] / 1e9) for key, text in said.items() if key in results.roofline]
    return f"{results.environment['device']}: {', '.join(parts)}"


def _notes(results: Results) -> list[str]:
    fewer = [_FEWER_BITS] * any(row.fewer_bits for row in results.rows)
    return results.notes + fewer + [_SYNTHETIC] * any(row.synthetic for row in results.rows)
