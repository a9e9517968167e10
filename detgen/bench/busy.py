"""Whether other processes took part of the machine, and what that did to which cells: in words."""

from __future__ import annotations

from collections.abc import Iterable

from detgen.bench.bench_results import Row
from detgen.bench.processor_time import Others
from detgen.machine import usable_cores

_REMEDY = "speeds are lower and vary more than on a quiet machine"


def busy_now(others: Others | None) -> list[str]:
    """A line if the machine is busy before anything is measured."""
    if others is None or not others.disturb:
        return []
    return [f"this machine is busy: other processes take {_of_processors(others.share)}; {_REMEDY}"]


def busy_cells(rows: Iterable[Row]) -> list[str]:
    """A line that names the cells that other processes disturbed, all runs of a cell together."""
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
