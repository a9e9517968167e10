"""What is shipped of the embedded models is what transformers tells of them today."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detgen.errors import DEMO
from detgen.models.keeping import Kept, shipped

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import keep_demo_models  # noqa: E402

ANEW = "python tools/keep_demo_models.py writes it anew"


def facts(kept: Kept) -> dict[str, Any]:
    """All but the digest of logits: torch's differ in their last bits between processors."""
    return {**kept.facts, "own": kept.facts["own"] | {"agreed": None}}


@pytest.fixture(scope="module")
def told() -> dict[Path, Kept]:
    return keep_demo_models.told()


def test_facts_and_logits(told: dict[Path, Kept]) -> None:
    assert sorted(told) == sorted(DEMO.glob("*.kept"))
    for path, now in told.items():
        there = Kept.read(path)
        assert there is not None, ANEW
        assert facts(there) == facts(now), ANEW
        assert there.arrays.keys() == now.arrays.keys(), ANEW
        for name, logits in now.arrays.items():
            assert np.abs(there.arrays[name] - logits).max() < 1e-5 * np.abs(logits).max(), ANEW


def test_nothing_says_where_it_was_made(told: dict[Path, Kept]) -> None:
    """Neither a path nor a version."""
    for path in told:
        content = path.read_bytes()
        assert b"demo_models" not in content
        assert b"transformers_version" not in content


def test_it_is_of_embedded_models_alone_and_of_the_usual_settings(tmp_path: Path) -> None:
    usual = "auto", "none", None
    assert shipped(DEMO / "draft", "draft", *usual) == DEMO / "draft.kept"
    (tmp_path / "link").symlink_to(DEMO)
    assert shipped(tmp_path / "link" / "target", "target", *usual) == DEMO / "target.kept"
    for folder, *asked in (
        (tmp_path / "target", "target", *usual),
        (DEMO / "target", "draft", *usual),
        (DEMO / "thinking", "target", *usual),
        (DEMO / "target", "target", "bfloat16", "none", None),
        (DEMO / "target", "target", "auto", "q8", None),
        (DEMO / "target", "target", "auto", "none", "digest of an adapter"),
    ):
        assert shipped(folder, *asked) is None
