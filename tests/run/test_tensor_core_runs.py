"""Runs whose products are added up as tensor cores do: the same bytes by every build, and audited by a processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import invoke
from helpers.examples import usual

from detgen.kernels.c.library import BUILDS, CHOICE, build

LINES = [
    {"prompt": "def add(a, b):", "max_tokens": 6, "logprobs": 2},
    {"prompt": "class Stack:\n", "max_tokens": 5, "temperature": 0.9, "n": 2, "seed": 3, "logprobs": 0},
    {"prompt": "import os\n\n\ndef size(path):", "max_tokens": 4, "logprobs": 1},
]


def run(folder: Path, dtype: str, *options: str) -> bytes:
    (place := folder.parent / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    done = invoke("run", str(place), "-o", str(folder), "--dtype", dtype, *options)
    assert done.exit_code == 0, done.output
    return (folder / "outputs.jsonl").read_bytes()


@pytest.mark.parametrize("dtype", usual(["bfloat16-tc25"], ["bfloat16-tc24"]))
def test_every_build_gives_the_bytes(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With log-probabilities; in batches of one and of several, with a drafter and without."""
    ways = ("--batch-size", "1", "--drafter", "none"), ("--batch-size", "3", "--drafter", "ngram", "--threads", "2")
    found = set()
    for i, name in enumerate(name for name in BUILDS if build(name) is not None):
        monkeypatch.setenv(CHOICE, name)
        found |= {run(tmp_path / f"{name}-{way[1]}", dtype, *way) for way in usual([ways[i % 2]], ways)}
    assert len(found) == 1
    assert found != {run(tmp_path / "pairs", "bfloat16")}


def test_audit(tmp_path: Path) -> None:
    """By the rule of the run; by another one the profile differs, and what it judges is near."""
    run(out := tmp_path / "out", "bfloat16-tc25")
    profile = json.loads((out / "manifest.json").read_text())["profile"]
    assert (profile["dtype"], profile["kv_dtype"]) == ("bfloat16-tc25", "bfloat16")
    done = invoke("audit", str(out))
    assert (done.exit_code, "nothing differs" in done.output) == (0, True), done.output
    other = invoke("audit", str(out), "--dtype", "bfloat16-tc24")
    assert "bfloat16-tc25" in other.output
    assert "bfloat16-tc24" in other.output
