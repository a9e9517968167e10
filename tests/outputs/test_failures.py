"""The first errors of a run, as a person is shown them."""

from __future__ import annotations

import json
from pathlib import Path

from detgen.outputs import first_errors


def test_the_first_errors(tmp_path: Path) -> None:
    lines = [{"text": 'an "error": in a text'}, {"error": "a"}, {"text": "b", "metadata": {"error": "c"}}]
    lines += [{"error": "x" * 1000}, {"error": None}, {"error": "d"}, {"error": "e"}]
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines) + '{"error":"torn')
    assert first_errors(path, 3) == ["a", "x" * 300 + "...", "d"]
    assert first_errors(path, 9)[3:] == ["e"]
    assert first_errors(tmp_path / "missing", 3) == []
