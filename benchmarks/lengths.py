"""Mixed lengths: requests whose prompts and outputs are log-normal, as in a file of real work; a seed draws them."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

PROMPTS = (200, 1.0)  # median and sigma of the tokens of a prompt
OUTPUTS = (200, 0.9)
MOST_PROMPT = 6_000
LONG = (8_000, 24_000)  # least and most tokens of the few long prompts


class Lengths(NamedTuple):
    """What a request asks for, and what becomes of it.

    Attributes:
        prompt: tokens of the prompt.
        output: tokens that it generates, the end-of-sequence token included; at most `most`.
        most: its `max_tokens`, all that a scheduler knows about the output.
    """

    prompt: int
    output: int
    most: int

    @property
    def positions(self) -> int:
        """Positions of the KV cache that it fills: the last token's entries are never needed."""
        return self.prompt + self.output - 1


def draw_lengths(count: int, most: int, seed: int, *, scale: float = 1.0, long: float = 0.0) -> list[Lengths]:
    """Lengths of `count` requests.

    Args:
        count: how many.
        most: `max_tokens` of each; outputs are cut there.
        seed: of the draw.
        scale: factor of the lengths, but not of `most`.
        long: share of the prompts that have a length from `LONG`, all equally likely.
    """
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        prompt, output = (
            max(round(median * scale * math.exp(sigma * drawn.gauss(0, 1))), 1) for median, sigma in (PROMPTS, OUTPUTS)
        )
        prompt = min(prompt, round(MOST_PROMPT * scale))
        if long and drawn.random() < long:
            prompt = round(drawn.randint(*LONG) * scale)
        found.append(Lengths(prompt, min(output, most), most))
    return found
