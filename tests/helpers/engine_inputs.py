"""What the engine's tests give it: prompts, tokens, and a drafter that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detgen.drafters.protocol import Draft, Drafter

SAMPLES = Path(__file__).parents[2] / "sample_prompts"
PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n", "for i in range(", "try:\n    ", "x = [", "if __name__"]


def code(n: int) -> list[str]:
    """Some of the sample prompts, spread over the file."""
    lines = (SAMPLES / "code.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // n]][:n]


def ids(length: int, first: int = 5) -> tuple[int, ...]:
    return tuple(first + 3 * i % 4000 for i in range(length))


class Adversary(Drafter):
    """A drafter most of whose tokens are wrong."""

    name = "adversary"

    def draft(self, seqs: Any, lengths: list[int]) -> list[Draft]:
        """Tokens that nothing predicts."""
        return [
            Draft([(s.tokens[-1] * 7 + i + 1) % 4096 for i in range(n)], self.name)
            for s, n in zip(seqs, lengths, strict=True)
        ]


def adversary(_: Any) -> Drafter:
    """Makes one, whatever the engine has."""
    return Adversary()
