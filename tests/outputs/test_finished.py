"""A run that is there."""

from __future__ import annotations

import json
from pathlib import Path

from detgen.outputs import first_errors


def test_the_first_errors(tmp_path: Path) -> None:
    """As a person is shown them."""
    head = {"id": "a", "index": 0, "sample": 0}
    text = {"token_ids": [], "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 0, "seed": 0}
    lines = [{"text": 'an "error": in a text', **text, "stop_reason": None}, {"error": "a"}]
    lines += [{"text": "b", **text, "metadata": {"error": "c"}, "stop_reason": None}]
    lines += [{"error": "x" * 1000}, {"error": None}, {"error": "d"}, {"error": "e"}]
    path = tmp_path / "outputs.jsonl"
    whole = "".join(json.dumps(head | line, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(whole + '{"error":"torn')
    assert first_errors(path, 3) == ["a", "x" * 300 + "...", "d"]
    assert first_errors(path, 9)[3:] == ["e"]
    assert first_errors(tmp_path / "missing", 3) == []
