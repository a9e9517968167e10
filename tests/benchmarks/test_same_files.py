"""The comparison of two checkouts finds what differs, and lists what may."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import same_files
from same_files import Case, Findings, compare_lines

LINES: list[dict[str, Any]] = [
    {"id": "a", "index": 0, "sample": 0, "text": "x", "logprobs": [{"token": 5, "logprob": -0.25}]},
    {"id": "b", "index": 1, "sample": 0, "error": "p.jsonl:2: no"},
]


def _compared(folder: Path, new: list[dict[str, Any]]) -> Findings:
    found = Findings()
    for side, lines in (("old", LINES), ("new", new)):
        (folder / side).mkdir()
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / side / "outputs.jsonl").write_text(text)
    compare_lines(Case("case", "p.jsonl"), folder / "old", folder / "new", found)
    return found


def test_the_same_lines(tmp_path: Path) -> None:
    found = _compared(tmp_path, LINES)
    assert (found.files, found.lines, found.faults) == (1, 2, [])


@pytest.mark.parametrize(
    "new",
    [
        [{**LINES[0], "text": "y"}, LINES[1]],
        [{**LINES[0], "more": 1}, LINES[1]],
        [dict(reversed(LINES[0].items())), LINES[1]],
        [LINES[0]],
        [LINES[0], {**LINES[1], "id": "c", "error": "other"}],
        [LINES[0], {"id": "b", "index": 1, "sample": 0, "text": "ran"}],
        [{"id": "a", "index": 0, "sample": 0, "error": "refused"}, LINES[1]],
    ],
)
def test_what_differs_is_a_fault(tmp_path: Path, new: list[dict[str, Any]]) -> None:
    assert len(_compared(tmp_path, new).faults) == 1


def test_errors_may_have_other_texts(tmp_path: Path) -> None:
    found = _compared(tmp_path, [LINES[0], {**LINES[1], "error": "better"}])
    assert found.faults == []
    assert found.reworded == [("case: outputs.jsonl, number 2", "p.jsonl:2: no", "better")]


def test_what_is_declared_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(same_files.ADDED, "outputs.jsonl", ("stop_reason", "logprobs.*.text"))
    logprobs = [{"token": 5, "logprob": -0.25, "text": "x"}]
    new = [{**LINES[0], "logprobs": logprobs, "stop_reason": None}, {**LINES[1], "stop_reason": None}]
    assert _compared(tmp_path, new).faults == []


def test_a_line_is_refused_for_a_declared_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_files, "REFUSED_NOW", ("given twice",))
    found = _compared(tmp_path, [{"id": "a", "index": 0, "sample": 0, "error": "n is given twice"}, LINES[1]])
    assert found.faults == []
    assert [each[2] for each in found.refused] == ["n is given twice"]
