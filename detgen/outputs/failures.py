"""The errors among the lines of a run."""

from __future__ import annotations

import json
from pathlib import Path

from detgen.outputs.directory import open_plain

_LONGEST = 300


def first_errors(outputs: Path, count: int) -> list[str]:
    """The first `count` errors of `outputs.jsonl`, shortened; nothing if it cannot be read."""
    found: list[str] = []
    try:
        with open(open_plain(outputs), "rb") as lines:
            for line in lines:
                if b'"error":' in line and isinstance(error := _error(line), str):
                    found.append(error if len(error) <= _LONGEST else f"{error[:_LONGEST]}...")
                    if len(found) == count:
                        break
    except OSError:
        pass
    return found


def _error(line: bytes) -> object:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed.get("error") if isinstance(parsed, dict) else None
