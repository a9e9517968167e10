"""Once a model is kept, a run on a processor needs no PyTorch, and its bytes are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import invoke
from helpers.examples import usual

# Takes the place of an installation without it.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("there is no torch")

sys.meta_path.insert(0, Missing())
"""
PROMPT: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 12}
LINES = [
    PROMPT,
    {**PROMPT, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "n": 2, "seed": 3},
    {**PROMPT, "repetition_penalty": 1.2, "logit_bias": {"17": 2.0}, "min_tokens": 4},
    {"prompt": "A list:", "structured_outputs": {"choice": ["yes", "no"]}},
]


@pytest.mark.parametrize(
    "options", usual([("--target-quant", "q8")], [(), ("--dtype", "bfloat16-tc25"), ("--drafter", "self")])
)
def test_a_kept_model_runs_without(tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process keeps it; another one, which has no PyTorch, runs it."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(filter(None, (str(tmp_path / "without"), os.environ.get("PYTHONPATH"))))
    command = ["run", "prompts.jsonl", *options, "-o"]
    kept = invoke(*command, "first")
    assert kept.exit_code == 0, kept.output
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "detgen", *command, "second"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = (Path(name, "outputs.jsonl").read_bytes() for name in ("first", "second"))
    assert first == second
