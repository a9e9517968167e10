"""Acceptance logs: their lines, and what they add up to, counted record by record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from detgen.engine.request import TokenRecord
from detgen.engine.stats import DraftCounts
from detgen.outputs.records import LEFT_OUT, AcceptanceLine, keys_of, log_entry


def count_records(records: Iterable[TokenRecord]) -> DraftCounts:
    """The counts by drafter of one sample's log."""
    counts, rounds = DraftCounts(), set()
    for r in records:
        stats = counts[r.drafter]
        stats.rounds += (r.drafter, r.round) not in rounds
        rounds.add((r.drafter, r.round))
        stats.drafted += r.drafted is not None
        setattr(stats, r.status, getattr(stats, r.status) + 1)
    return counts


def log_line(entry: dict[str, Any]) -> str:
    """A line of the acceptance log, as detgen spells it, whatever its values are."""
    entry = dict(entry)
    if entry.get("status") == "accepted" and entry.get("drafted") == entry.get("token"):
        entry.pop("drafted", None)
    for name in ("logprob", "margin"):
        if isinstance(entry.get(name), float):
            entry[name] = float(str(np.float32(entry[name])))
    names = [name for name in dict.fromkeys((*keys_of(AcceptanceLine), *entry)) if name in entry]
    kept = {name: entry[name] for name in names if name not in LEFT_OUT or entry[name] != LEFT_OUT[name]}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n"


def log_entries(path: Path) -> list[dict[str, Any]]:
    """What an acceptance log says."""
    return [log_entry(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
