"""Runs give the bits that they gave before: output lines and raw logits of models of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.frozen import CASES, KNOWN, digest


@pytest.mark.parametrize("name", CASES)
def test_bits_are_known(name: str, tmp_path: Path) -> None:
    """What is meant to change them says so, and is followed by `python tests/helpers/frozen.py --write`."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    assert known.keys() == CASES.keys()
    assert digest(CASES[name], tmp_path) == known[name]
