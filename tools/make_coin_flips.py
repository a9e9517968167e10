"""Write sample_prompts/coin_flips.jsonl: stories for the demo model that thinks, some longer than in its training."""

from __future__ import annotations

import json
import random
from pathlib import Path

from thinking_tasks import COIN, HELD_OUT, NAMES, coin_flips

SAMPLES = Path(__file__).parent.parent / "sample_prompts"
COUNT = 64


def records(seed: int = 0) -> list[dict[str, str | int]]:
    """Return the first story, then others of up to 40 steps; half have other sentences, a quarter held-out names."""
    draw = random.Random(seed)
    found: list[dict[str, str | int]] = [{"id": "coin-1", "prompt": COIN.example, "answer": "heads", "steps": 2}]
    for number in range(2, COUNT + 1):
        steps = draw.randint(1, 40)
        names, besides = HELD_OUT if number % 4 == 0 else NAMES, 0.5 if number % 2 else 0.0
        story = coin_flips(draw, steps, names, besides)
        found.append({"id": f"coin-{number}", "prompt": story.text, "answer": story.answer.strip(), "steps": steps})
    return found


def main() -> None:
    """Write the file."""
    lines = "".join(json.dumps(record) + "\n" for record in records())
    (SAMPLES / "coin_flips.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
