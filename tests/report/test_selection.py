"""Which samples are shown: three where no ids are given, each once, with all reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.fakes import go

from detgen.report.log import read_log
from detgen.report.selection import Choosing
from detgen.report.streaming import Faults


def chosen(folder: Path, thoughtful: tuple[int, int] | None = None) -> list[tuple[tuple[int, int], list[str]]]:
    choosing = Choosing([], thoughtful)
    for entries in read_log(folder, json.loads((folder / "manifest.json").read_text()), Faults()):
        choosing.see(entries)
    assert all(one.records for one in choosing.chosen())
    return [(one.key, one.why) for one in choosing.chosen()]


def test_three_are_shown_whichever_rules_agree(finished: Path, log: list[dict[str, Any]]) -> None:
    found = chosen(finished)
    keys = [key for key, _ in found]
    assert len(set(keys)) == len(keys) == 3
    assert keys[0] == (log[0]["index"], log[0]["sample"])
    assert found[0][1][0] == "the first of the run"
    reasons = {why for _, all_ in found for why in all_}
    assert {"the one with the most tokens thrown away", "the one with the closest tie"} <= reasons


def test_the_most_thoughts_come_first(finished: Path, log: list[dict[str, Any]]) -> None:
    last = log[-1]["index"], log[-1]["sample"]
    found = chosen(finished, last)
    assert found[0][0] == last
    assert found[0][1][0] == "the one with the most thoughts"
    assert len(found) == 3


def test_a_short_run_shows_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}')
    go(tmp_path / "p.jsonl", tmp_path / "out")
    ((key, why),) = chosen(tmp_path / "out")
    assert key == (0, 0)
    assert why[0] == "the first of the run"
