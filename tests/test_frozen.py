"""Runs give the bits that they gave before: output lines and raw logits of models of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import THOROUGH, usual
from helpers.families import DESCRIBED, USUAL_FAMILIES
from helpers.frozen import CASES, KNOWN, digest

from detgen.runner import own_forward, preparing


@pytest.fixture(autouse=True)
def _compared_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are known are not compared with models' own forwards, which takes longer than they do."""
    if not THOROUGH:
        ask = own_forward.ask
        monkeypatch.setattr(own_forward, "ask", lambda loaded, model, **_: ask(loaded, model, compared=False))
        monkeypatch.setattr(preparing, "compared", lambda runner, own, vocabulary: own)


# What others have as well: `gemma`, `axk1` and `vaultgemma` of own forwards, `llama` of matrices in few bits.
REST = {f"{name}, own forward" for name in ("olmo", "nemotron", "persimmon", "biogpt")}
REST |= {f"gpt2, {kind}" for kind in ("float16", "nf4", "int8")}
# Families that consist of what others have.
ALIKE = DESCRIBED.keys() - {"llama", *USUAL_FAMILIES}


def check(name: str, folder: Path) -> None:
    """What is meant to change a digest says so, and is followed by `python tests/helpers/frozen.py --write`."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    assert known.keys() == CASES.keys()
    assert digest(CASES[name], folder) == known[name]


OTHERS = [name for name in CASES if name not in ALIKE]


@pytest.mark.parametrize("name", usual((name for name in OTHERS if name not in REST), OTHERS))
def test_bits_are_known(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_so_are_those_of_similar_families(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
