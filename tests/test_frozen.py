"""Runs give the bits that they gave before: output lines and raw logits of models of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import THOROUGH
from helpers.frozen import CASES, KNOWN, digest

from detgen.runner import own_forward, preparing


@pytest.fixture(autouse=True)
def _compared_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are known are not compared with models' own forwards, which takes longer than they do."""
    if not THOROUGH:
        ask = own_forward.ask
        monkeypatch.setattr(own_forward, "ask", lambda loaded, model, **_: ask(loaded, model, compared=False))
        monkeypatch.setattr(preparing, "compared", lambda runner, own, vocabulary: own)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_known(name: str, tmp_path: Path) -> None:
    """What is meant to change them says so, and is followed by `python tests/helpers/frozen.py --write`."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    assert known.keys() == CASES.keys()
    assert digest(CASES[name], tmp_path) == known[name]
