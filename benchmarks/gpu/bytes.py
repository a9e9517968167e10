"""Runs of the embedded pair on the processor and on the device: `outputs.jsonl` must have the same SHA-256."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.notebook import Asked, Notebook

_ROOT = Path(__file__).resolve().parents[2]
_PROMPTS = [
    {"prompt": "def add(a, b):\n"},
    {"prompt": "class Stack:\n    def push(self, item):\n", "temperature": 0.8, "seed": 3, "logprobs": 2},
    {"prompt": "for i in range(10):\n    print(i)\nfor i in", "temperature": 0.9, "top_p": 0.9, "top_k": 20, "n": 2},
    {"prompt": "class Queue:\n", "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


def measure(book: Notebook, asked: Asked) -> None:
    """Run with weights as they are and in few bits, with all drafters in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in _PROMPTS))
        wanted: dict[str, str] = {}
        for drafter in ("none",) if asked.tiny else ("none", "model", "self", "ngram"):
            for quant in ("none", "q8"):
                with book.part(f"{quant}, {drafter}"):
                    if quant not in wanted:
                        wanted[quant] = digest_of(folder, "cpu", quant, "auto", asked.tiny)
                    found, want = digest_of(folder, asked.device, quant, drafter, asked.tiny), wanted[quant]
                    said = "the SHA-256 of the processor" if found == want else f"OTHER BYTES: {found}, not {want}"
                    book.note(f"{quant}, {drafter}", {"equal": found == want}, f"{quant}, {drafter}: {said}")
                    assert found == want, said


def digest_of(folder: Path, device: str, quant: str, drafter: str, tiny: bool) -> str:
    """Return the SHA-256 of the outputs of a run of the prompts."""
    out = folder / f"{device}-{quant}-{drafter}"
    command = [sys.executable, "-m", "detgen", "run", str(folder / "prompts.jsonl"), "-o", str(out), "-q"]
    options = ["--device", device, "--target-quant", quant, "--drafter", drafter, "--max-tokens", "4" if tiny else "48"]
    subprocess.run([*command, *options], cwd=_ROOT, check=True, stdout=sys.stderr)
    return hashlib.sha256((out / "outputs.jsonl").read_bytes()).hexdigest()
