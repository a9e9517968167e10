"""Mixed lengths: requests whose prompts and outputs are log-normal, as in a file of real work; a seed draws them."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

PROMPTS = (200, 1.0)  # median and sigma of the tokens of a prompt
OUTPUTS = (200, 0.9)
MOST_PROMPT = 6_000


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


def draw_lengths(count: int, most: int, seed: int, *, scale: float = 1.0) -> list[Lengths]:
    """Lengths of `count` requests.

    Args:
        count: how many.
        most: `max_tokens` of each; outputs are cut there.
        seed: of the draw.
        scale: factor of the lengths, but not of `most`.
    """
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        prompt, output = (
            max(round(median * scale * math.exp(sigma * drawn.gauss(0, 1))), 1) for median, sigma in (PROMPTS, OUTPUTS)
        )
        prompt = min(prompt, round(MOST_PROMPT * scale))
        found.append(Lengths(prompt, min(output, most), most))
    return found
