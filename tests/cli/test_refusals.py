"""What needs no model to be refused is refused in a second: before torch is imported, in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fakes import go
from helpers.tampering import edit_manifest

CODE = """
import sys
from detgen.__main__ import main
try:
    main()
finally:
    if "torch" in sys.modules or "transformers" in sys.modules:
        sys.stderr.write("torch was imported\\n")
"""
SECONDS = 5.0  # it takes a third of one where nothing else runs

CASES = {
    "run no.jsonl": "there is no file no.jsonl",
    "run p.jsonl --top-p 2": "--top-p",
    "run p.jsonl --batch-size 0": "--batch-size",
    "run p.jsonl --drafter model --target some/model": "--drafter model needs a draft model",
    "run p.jsonl -o p.jsonl": "is a file, not a folder",
    "run p.jsonl -o /proc/nowhere": "cannot use the folder",
    "run p.jsonl --target ./no": "there is no such folder",
    "run p.jsonl --target a/b/c": "not a name on the hub",
    "run p.jsonl --target empty": "no config.json",
    "run p.jsonl --draft ./no": "there is no such folder",
    "audit no": "no manifest.json",
    "audit out": "there is no such folder",
    "audit out --target empty": "no config.json",
    "audit out no.jsonl": "there is no file no.jsonl",
    "audit out --json no/where.json": "there is no folder",
    "verify-determinism no.jsonl": "there is no file no.jsonl",
    "verify-determinism --axis shape": "there is no axis 'shape'",
    "verify-determinism --target ./no": "there is no such folder",
    "verify-determinism --probe --target ./no": "there is no such folder",
    "verify-determinism --replay no.json": "there is no such file",
    "verify-determinism --against no": "no manifest.json",
    "verify-determinism --threads 0": "--threads must be",
    "bench --target ./no": "there is no such folder",
    "bench --random-weights no": "there is no configuration",
    "bench --workload no": "there is no workload",
    "bench --workload file:no.jsonl": "there is no such file",
    "bench -o /proc/nowhere": "cannot write to /proc/nowhere",
    "bench --rounds 0": "--rounds must be",
}


@pytest.mark.parametrize("arguments", CASES)
def test_refused_before_torch_is_imported(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty").mkdir()
    go(tmp_path / "p.jsonl", tmp_path / "out")
    edit_manifest(tmp_path / "out", lambda manifest: manifest.update(model="./no"))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    taken = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    assert "torch was imported" not in done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.replace("│", " ").split())
    assert CASES[arguments] in said
    assert len([line for line in done.stderr.splitlines() if "error: " in line]) == (0 if "╭" in said else 1)
    assert taken < SECONDS
