"""Describes what changed between two benchmarks, beyond noise, and which cells other processes disturbed.

A speed has changed if its ranges over the rounds, each widened by 5 % of its median, do not overlap. Other figures are
exact for the same workload, so any difference counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from detgen.bench.bench_results import Results, Row
from detgen.bench.processor_time import Others
from detgen.machine import usable_cores

_MARGIN = 0.05  # of the median: the difference between two runs on a quiet machine, besides the spread within each
_REMEDY = "speeds are lower and vary more than on a quiet machine"


def compare(old: Results, new: Results) -> list[str]:
    """Return the changes, one line each; empty if there are none."""
    before = {row.key: row for row in old.rows}
    after = {row.key: row for row in new.rows}
    lines = list(_settings(old, new))
    for key, row in after.items():
        if key not in before:
            lines.append(f"{_name(row)}: was not measured before")
        else:
            lines += [f"{_name(row)}: {change}" for change in _changes(before[key], row)]
    lines += [f"{_name(row)}: is no longer measured" for key, row in before.items() if key not in after]
    return lines


def _settings(old: Results, new: Results) -> Iterator[str]:
    a, b = old.environment, new.environment
    for name in ("device", "threads", "detgen", "models"):
        if a[name] != b[name]:
            yield f"{name}: {a[name]} before, {b[name]} now"
    for name in sorted(a["versions"].keys() | b["versions"].keys()):
        one, other = a["versions"].get(name, "absent"), b["versions"].get(name, "absent")
        if one != other:
            yield f"{name}: {one} before, {other} now"


def _name(row: Row) -> str:
    return f"{row.workload}, batch {row.batch_size}, {row.label}"


def _changes(old: Row, new: Row) -> Iterator[str]:
    if old.error != new.error:
        yield f"error: {old.error or 'none'} before, {new.error or 'none'} now"
    if old.wrong != new.wrong:
        yield f"wrong: {old.wrong or 'nothing'} before, {new.wrong or 'nothing'} now"
    if not old.seconds or not new.seconds:
        return
    if (old.requests, old.prompt_tokens, old.output_tokens) != (new.requests, new.prompt_tokens, new.output_tokens):
        yield "another workload than before, so the rest is not compared"
        return
    if apart(old.speeds, new.speeds):
        a, b = median(old.speeds), median(new.speeds)
        yield f"{a:,.0f} tokens/s before, {b:,.0f} now ({b / a - 1:+.0%})"
    if old.verdict != new.verdict:
        yield f"same bytes: {old.verdict} before, {new.verdict} now"
    if old.agreement != new.agreement:
        yield f"prompts as with drafter none: {old.agreement} before, {new.agreement} now"


def apart(a: list[float], b: list[float]) -> bool:
    """Return whether two lists of figures differ beyond noise."""
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    return low_a > high_b or low_b > high_a


def _range(values: list[float]) -> tuple[float, float]:
    slack = _MARGIN * median(values)
    return min(values) - slack, max(values) + slack


def busy_now(others: Others | None) -> list[str]:
    """Return a line if the machine is busy before anything is measured."""
    if others is None or not others.disturb:
        return []
    return [f"this machine is busy: other processes take {_of_processors(others.share)}; {_REMEDY}"]


def busy_cells(rows: Iterable[Row]) -> list[str]:
    """Return a line naming the cells that other processes disturbed, over all runs of a cell."""
    sums: dict[tuple[str, int], Others] = {}
    for row in rows:
        for seconds, there_were in row.others:
            before = sums.get((row.workload, row.batch_size), Others(0.0, 0.0))
            sums[row.workload, row.batch_size] = Others(before.seconds + seconds, before.there_were + there_were)
    busy = {cell: others.share for cell, others in sums.items() if others.disturb}
    if not busy:
        return []
    cells = ", ".join(f"{workload}, batch {size} ({_of_processors(share)})" for (workload, size), share in busy.items())
    return [f"measured while other processes worked: {cells}; {_REMEDY}"]


def _of_processors(share: float) -> str:
    cores = usable_cores()
    return f"{share:.0%} of {cores} processors" if cores > 1 else f"{share:.0%} of the processor"
