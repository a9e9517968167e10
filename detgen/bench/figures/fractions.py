"""Figure 10: throughput over the share of verified requests, normalised to no verification at all."""

from __future__ import annotations

from statistics import median
from typing import Any

from detgen.bench.rows import Row

DRAFTERS = ("none", "self", "auto")


def by_fraction(rows: list[Row]) -> dict[str, Any]:
    """The figure's data from measured rows.

    Returns:
        for each workload and drafter the pairs (percent verified, speed over the fast path's in the same rounds).
    """
    found: dict[str, Any] = {}
    for row in rows:
        drafter = row.label.split(",")[0].removeprefix("detgen ")
        if row.peer == "detgen" and drafter in DRAFTERS and row.over_fast and row.fraction and not row.synthetic:
            place = found.setdefault(f"{row.workload}, batch {row.batch_size}", {})
            place.setdefault(drafter, []).append([100 * row.fraction, median(row.over_fast)])
    return {name: {d: sorted(points) for d, points in drafters.items()} for name, drafters in found.items()}
