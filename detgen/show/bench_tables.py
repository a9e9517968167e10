"""The results as tables: on the terminal and as Markdown, the fastest row of a cell first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from detgen.bench.rows import Results, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTE = (
    "Speeds are medians of interleaved rounds, with the lowest and highest round in brackets; ratios are medians of"
    " ratios within a round. All prompts of a cell are submitted at once, so times to the first token contain waiting"
    " for a slot. Every prompt gets its number of tokens, end-of-sequence tokens included. Greedy; loading is left out;"
    " memory is the peak of the peer's process while it ran the row. Bandwidth counts the weights once a pass; weights"
    " that stay in the caches can pass what a copy moves."
)


class Column(NamedTuple):
    """A heading and what stands below it."""

    heading: str
    value: Callable[[Row], str]


def _label(row: Row) -> str:
    return f"{row.label} (WRONG)" if row.wrong else row.label


def _speed(row: Row) -> str:
    if row.error:
        return "failed"
    return span(row.speeds, "{:,.0f}")


def _total(row: Row) -> str:
    if not row.seconds:
        return "-"
    factor = (row.prompt_tokens + row.output_tokens) / row.output_tokens
    return f"{median(row.speeds) * factor:,.0f}"


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


def same_bytes(row: Row) -> str:
    """`yes`, or how many prompts differ, at two batch sizes."""
    if row.same_bytes is None:
        return "-"
    same, of, other = row.same_bytes
    return f"yes (with {other})" if same == of else f"no: {of - same} of {of} (with {other})"


def _agreement(row: Row) -> str:
    return "-" if row.agreement is None else f"{row.agreement[0]} of {row.agreement[1]}"


def _memory(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**30:.2f}"


_LABEL = Column("setting", _label)

SPEED = (
    _LABEL,
    Column("precision", lambda r: r.precision),
    Column("output tokens/s", _speed),
    Column("total tokens/s", _total),
    Column("x fast path", lambda r: span(r.over_fast, "{:.2f}")),
    Column("x transformers", lambda r: span(r.over_transformers, "{:.2f}")),
    Column("first token p50 / p99, s", lambda r: _pair(r.ttft, 1.0)),
    Column("per token p50 / p99, ms", lambda r: _pair(r.tpot, 1e-3)),
    Column("same bytes", same_bytes),
)
WORK = (
    _LABEL,
    Column("tokens a pass", lambda r: f"{r.output_tokens / r.passes:.2f}" if r.passes else "-"),
    Column("accepted", lambda r: _share(r.counts.get("accepted"), r.counts.get("drafted"))),
    Column("roll-backs", lambda r: f"{r.counts['corrected']}" if r.counts.get("drafted") else "-"),
    Column("recomputed tokens", _recomputed),
    Column("padding", lambda r: _share(r.counts.get("padding_rows"), r.counts.get("rows"))),
    Column("memory, GiB", lambda r: _memory(r.memory)),
    Column("GPU memory, GiB", lambda r: _memory(r.gpu_memory)),
    Column("of bandwidth", lambda r: "-" if r.bandwidth_share is None else f"{r.bandwidth_share:.0%}"),
    Column("of arithmetic", lambda r: "-" if r.arithmetic_share is None else f"{r.arithmetic_share:.1%}"),
    Column("as drafter none", _agreement),
)


def span(values: list[float], pattern: str) -> str:
    """Such as `310 [305, 322]`: the median, the lowest and the highest."""
    if not values:
        return "-"
    middle, low, high = (pattern.format(f(values)) for f in (median, min, max))
    return f"{middle} [{low}, {high}]" if len(values) > 1 else middle


def cells(results: Results) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each cell under its heading: measured ones by speed, then those with errors."""
    keys = dict.fromkeys((r.workload, r.batch_size) for r in results.rows)
    for workload, size in keys:
        rows = [r for r in results.rows if (r.workload, r.batch_size) == (workload, size)]
        first = rows[0]
        heading = (
            f"{workload}, batch {size}: {first.requests} requests, {first.prompt_tokens:,} tokens in,"
            f" {first.output_tokens:,} out"
        )
        yield heading, sorted(rows, key=lambda r: -median(r.speeds) if r.seconds else 0.0)


def used(columns: tuple[Column, ...], rows: list[Row]) -> tuple[list[Column], list[list[str]]]:
    """The columns that have something to say, and in text the rows that have."""
    texts = [[c.value(r) for c in columns] for r in rows]
    texts = [text for text in texts if any(value != "-" for value in text[1:])]
    keep = [i for i in range(len(columns)) if i == 0 or any(text[i] != "-" for text in texts)]
    return [columns[i] for i in keep], [[text[i] for i in keep] for text in texts]


def remarks(rows: list[Row]) -> Iterator[str]:
    """What is wrong with rows, and why some could not be measured."""
    for row in rows:
        if row.wrong:
            yield f"WRONG {row.label}: {row.wrong}"
        if row.error:
            yield f"FAILED {row.label}: {row.error}"


def render(results: Results) -> RenderableType:
    """The tables for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for heading, rows in cells(results):
        parts.append(Text(f"\n{heading}", style="bold"))
        for columns in (SPEED, WORK):
            chosen, texts = used(columns, rows)
            if not texts:
                continue
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for i, column in enumerate(chosen):
                table.add_column(column.heading, justify="right" if i else "left", overflow="fold", no_wrap=not i)
            for text in texts:
                table.add_row(*(Text(value) for value in text))
            parts += [table, Text("")]
        parts += [Text(line, style="red") for line in remarks(rows)]
    parts += [Text(line, style="dim") for line in (roof_line(results), *_notes(results))]
    return Group(*parts)


def _notes(results: Results) -> Iterator[str]:
    yield from results.notes
    if any(row.synthetic for row in results.rows):
        yield (
            "synthetic rows: the drafter is told the continuation and is right at the rate in the row's name, at a"
            " draft model's cost; fewer drafts are accepted, since none counts behind a wrong one"
        )


def roof_line(results: Results) -> str:
    """What the machine can do, in words."""
    if not results.roofline:
        return "the machine's bandwidth and arithmetic were not measured"
    copied, operations = results.roofline["copy_bytes"], results.roofline["product_operations"]
    name = results.environment["device"]
    return f"{name}: a copy moves {copied / 1e9:.1f} GB/s, a product {operations / 1e9:,.0f} GFLOP/s"


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
    yield f"{roof_line(results)}. {env['created']}."
    for heading, rows in cells(results):
        yield f"\n## {heading}"
        for columns in (SPEED, WORK):
            chosen, texts = used(columns, rows)
            if texts:
                yield ""
                yield "| " + " | ".join(c.heading for c in chosen) + " |"
                yield "| --- |" + " ---: |" * (len(chosen) - 1)
                yield from ("| " + " | ".join(value.replace("|", "\\|") for value in text) + " |" for text in texts)
        for line in remarks(rows):
            yield f"\n**{line}**"
    yield ""
    yield from (f"- {note}" for note in _notes(results))
    yield from (f"- workload {name}: {origin}" for name, origin in results.workloads.items())
    yield f"\n{NOTE}"
