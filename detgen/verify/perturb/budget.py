"""The time of a check: what a setting will take, and how much of the prompts leaves time for the settings."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

FEW = 4  # requests that a check has at least: of fewer prompts there are copies

_REFERENCES = 10  # the settings together take about so many times as long as the reference
_TOKENS, _LEAST_TOKENS = 24, 4  # of each prompt: enough to draft in, and so few that more prompts are worth more


class OutOfTime(Exception):  # noqa: N818 (nothing is wrong)
    """The time is over before something was generated."""


def check_time(until: float | None) -> None:
    """Go on only while there is time.

    Args:
        until: as `time.monotonic`; None for ever.

    Raises:
        OutOfTime: it is over.
    """
    if until is not None and time.monotonic() > until:
        raise OutOfTime


@dataclass(slots=True)
class Costs:
    """Seconds that parts of a check take on this machine.

    Attributes:
        reading: a token of a prompt.
        token: a generated one, by itself; also any other pass with few rows.
        expected: the settings tried so far, had they been generated as the reference is.
        spent: the same settings, as they were.
    """

    reading: float
    token: float
    expected: float = 0.0
    spent: float = 0.0

    def request(self, prompt: int, tokens: int, chunk: int | None = None) -> float:
        """A request by itself, of so many prompt tokens (read in chunks of so many) and generated ones."""
        passes = 0 if chunk is None else ceil(prompt / chunk)
        return max(prompt * self.reading, passes * self.token) + tokens * self.token

    @property
    def pace(self) -> float:
        """Seconds that a setting takes for each that its requests take by themselves."""
        return self.spent / self.expected if self.expected else 1.0

    def fitting(self, sizes: list[tuple[int, int, int]], seconds: float) -> tuple[int, int]:
        """How many of the first prompts, with how many new tokens each at most, leave the settings time.

        All with fewer tokens where that is enough, else fewer prompts, else both.

        Args:
            sizes: tokens of each prompt, new tokens and samples.
            seconds: for reference and settings together.

        Raises:
            OutOfTime: not even a few prompts with a few tokens can be generated within them.
        """

        def taken(count: int, most: int) -> float:
            asked = (self.request(prompt, samples * min(tokens, most)) for prompt, tokens, samples in sizes[:count])
            return sum(asked) * max(FEW / count, 1.0)

        few, longest = min(FEW, len(sizes)), max(tokens for _, tokens, _ in sizes)
        if taken(few, _LEAST_TOKENS) > seconds:
            raise OutOfTime
        share = seconds / _REFERENCES
        for count, least in (*((count, _TOKENS) for count in range(len(sizes), few - 1, -1)), (few, _LEAST_TOKENS)):
            if taken(count, least) <= share:
                fits = bisect_right(range(least, longest), share, key=lambda most: taken(count, most + 1))
                return count, least + fits
        return few, _LEAST_TOKENS
