"""The time of a check: estimates for its settings, and how many prompts leave time for them."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

from detgen.engine.request import Request
from detgen.params import SamplingParams
from detgen.verify.perturb.axes import Setting, Value
from detgen.verify.perturb.prompts import FEW

_REFERENCES = 10  # the settings together take about so many times as long as the reference
_TOKENS, _LEAST_TOKENS = 24, 4  # per prompt: enough to draft in; beyond it, more prompts are worth more
_READ, _TIMED = 64, 8  # tokens that are read, and generated, to measure the time per token


class OutOfTime(Exception):  # noqa: N818 (nothing is wrong)
    """Time ran out before something was generated."""


def check_time(until: float | None) -> None:
    """Raise if the time is over.

    Args:
        until: in the time of `time.monotonic`; None for no limit.

    Raises:
        OutOfTime: if it is over.
    """
    if until is not None and time.monotonic() > until:
        raise OutOfTime


@dataclass(slots=True)
class Timing:
    """Seconds that parts of a check take on this machine.

    Attributes:
        reading: for a prompt token.
        token: for a generated token by itself, or any other pass with few rows.
        start: for a process to load the models.
        expected: for the settings tried so far, if their requests were generated one by one.
        spent: for the same settings, as measured.
    """

    reading: float
    token: float
    start: float = 0.0
    expected: float = 0.0
    spent: float = 0.0

    def request(self, prompt: int, tokens: int, chunk: int | None = None) -> float:
        """Return the time for a request by itself: prompt tokens (read in chunks of `chunk`) and generated ones."""
        passes = 0 if chunk is None else ceil(prompt / chunk)
        return max(prompt * self.reading, passes * self.token) + tokens * self.token

    def alone(self, setting: Setting, sizes: Iterable[tuple[int, int, bool]]) -> float:
        """Return the time for a setting's requests one by one, including missing references.

        Args:
            setting: the setting.
            sizes: per request: prompt tokens, generated tokens, and whether there is a reference.
        """
        twice = setting.prefix_cache in ("warm", "shared")
        return sum(
            self.request(prompt, tokens, setting.chunk)
            + twice * self.request(prompt, 1)
            + (not made) * self.request(prompt, tokens)
            for prompt, tokens, made in sizes
        )

    def starting(self, setting: Setting, *, loaded: bool) -> float:
        """Return the time for processes to load the models, unless they are loaded."""
        return self.start * (2 if setting.process == "resumed" else setting.process == "fresh" and not loaded)

    @property
    def pace(self) -> float:
        """Measured seconds of settings per second expected for their requests one by one."""
        return self.spent / self.expected if self.expected else 1.0

    def fitting(self, sizes: list[tuple[int, int, int]], seconds: float) -> tuple[int, int]:
        """Return how many prompts, with how many new tokens each at most, leave time for the settings.

        Tokens are reduced first, then prompts, then both.

        Args:
            sizes: per prompt: its tokens, new tokens, and samples.
            seconds: time for reference and settings together.

        Raises:
            OutOfTime: if there is not even time for a few prompts with few tokens.
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


def measured(generate: Callable[[Request], Any], prompt: list[int], start: float) -> Timing:
    """Measure the time per token on the beginning of a prompt.

    Args:
        generate: continues a request.
        prompt: its tokens.
        start: seconds that a process took to load the models.
    """
    seconds, beginning = list[float](), tuple(prompt[:_READ])
    for tokens in (1, 1, 1 + _TIMED):  # the first time takes longer
        began = time.monotonic()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        generate(Request(0, "timed", token_ids=beginning, params=params))
        seconds.append(time.monotonic() - began)
    token = max((seconds[2] - seconds[1]) / _TIMED, 1e-5)
    return Timing(max(seconds[1] - token, 0.0) / len(beginning), token, start)


def quickest(settings: list[Setting], seconds: Callable[[Setting], float]) -> list[Setting]:
    """Order settings by how many new values per second they bring, so that new values are tried early."""
    left = [(s, {*s.changed().items()}, seconds(s)) for s in settings]
    found, seen = list[Setting](), set[tuple[str, Value]]()
    while left:
        best = max(left, key=lambda each: (len(each[1] - seen) / each[2], -each[2]))
        left.remove(best)
        found.append(best[0])
        seen |= best[1]
    return found
