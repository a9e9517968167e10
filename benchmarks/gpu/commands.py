"""detgen's own checks on the device, run as a user would; their output goes to the stage's log as it comes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.notebook import Asked, Notebook

_ROOT = Path(__file__).resolve().parents[2]
_LAST = {"quick": 15, "cuda-tests": 12}  # lines to keep


def command_of(asked: Asked, answer: Path) -> list[str]:
    """Return the command of a stage, which writes its answer to a file if it can."""
    python = [sys.executable, "-u", "-m"]
    if asked.stage == "cuda-tests":
        # Collecting all tests would take longer than running these.
        marked = [str(path) for path in sorted(_ROOT.glob("tests/**/test_*.py")) if ".mark.cuda" in path.read_text()]
        return [*python, "pytest", "-m", "cuda and not slow", "-p", "no:cacheprovider", "--durations=5", *marked]
    check = [*python, "detgen", "verify-determinism", "--device", asked.device, "--json", str(answer)]
    save = ["--save", str(answer.with_name("difference.json"))]
    return [*check, "--quick", *save, *(["--limit", "2", "--axis", "batch"] if asked.tiny else [])]


def measure(book: Notebook, asked: Asked) -> None:
    """Run the command, and keep its last lines and its answer."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = command_of(asked, answer)
        lines = []
        with subprocess.Popen(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
        book.note("status", process.returncode)
        book.say(*[line for line in lines if line][-_LAST[asked.stage] :])
        if answer.exists():
            book.note("answer", json.loads(answer.read_text(encoding="utf-8")))
        assert process.returncode == 0, f"exit status {process.returncode}"
