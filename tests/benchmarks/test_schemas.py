"""The trial of JSON schemas: it counts what fits and what is refused, and shows what does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import schemas

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FILES: dict[str, dict[str, Any]] = {
    "a": {
        "schema": {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], "additionalProperties": False},
        "tests": [{"valid": True, "data": {"n": 3}}, {"valid": False, "data": {"n": 12}}, {"valid": False, "data": 3}],
    },
    "b": {"schema": {"not": DIGIT}},
    "c": {"schema": {"type": "array", "items": DIGIT, "minItems": 60, "maxItems": 60}},
}


@pytest.mark.parametrize("broken", [False, True])
def test_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, broken: bool
) -> None:
    """With a judge that finds a fault in all that it is given, each text that ended is shown."""
    for name, content in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    if broken:
        monkeypatch.setattr(schemas, "judged", lambda schema, value: "$.n: wrong (maximum)")
    monkeypatch.setattr(sys, "argv", ["schemas.py", str(tmp_path), "--max-tokens", "40"])
    schemas.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[broken:] == [
        "3 schemas, 1 refused",
        '1 guided_json is refused: Unimplemented keys: ["not"]',
        "2 invalid values ruled out",
        f"1 texts that ended: {'do not fit' if broken else 'fits'}",
        "1 texts: length",
        "1 texts: stop",
        "1 valid values let through",
    ]
    assert not broken or lines[0].startswith('a.json: $.n: wrong (maximum): {"n": ')


@pytest.mark.parametrize(
    ("schema", "value", "verdict"),
    [
        ({"format": "date"}, "2024-02-29", "fits"),
        ({"format": "date"}, "2023-02-29", "$: '2023-02-29' is not a 'date' (format)"),
        ({"properties": {"a": {"format": "ipv4"}}}, {"a": "1.2.3.256"}, "$.a: '1.2.3.256' is not a 'ipv4' (format)"),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "format": "email"},
            "x",
            "$: 'x' is not a 'email' (format)",
        ),
    ],
)
def test_judged(schema: Any, value: Any, verdict: str) -> None:
    """Formats count, by the schema's own draft."""
    assert schemas.judged(schema, value) == verdict
