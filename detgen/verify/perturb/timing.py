"""The time of a check: what its settings will take, and how much of the prompts leaves time for them."""

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
_TOKENS, _LEAST_TOKENS = 24, 4  # of each prompt: enough to draft in, and so few that more prompts are worth more
_READ, _TIMED = 64, 8  # tokens that are read, and generated, to see how long one takes


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
class Timing:
    """Seconds that parts of a check take on this machine.

    Attributes:
        reading: a token of a prompt.
        token: a generated one, by itself; also any other pass with few rows.
        start: a process that loads the models.
        expected: the settings tried so far, had they been generated as the reference is.
        spent: the same settings, as they were.
    """

    reading: float
    token: float
    start: float = 0.0
    expected: float = 0.0
    spent: float = 0.0

    def request(self, prompt: int, tokens: int, chunk: int | None = None) -> float:
        """A request by itself, of so many prompt tokens (read in chunks of so many) and generated ones."""
        passes = 0 if chunk is None else ceil(prompt / chunk)
        return max(prompt * self.reading, passes * self.token) + tokens * self.token

    def alone(self, setting: Setting, sizes: Iterable[tuple[int, int, bool]]) -> float:
        """A setting's requests one by one, with what is missing of their reference.

        Args:
            setting: how they are generated.
            sizes: tokens of each prompt, generated ones, and whether there is a reference.
        """
        twice = setting.prefix_cache in ("warm", "shared")
        return sum(
            self.request(prompt, tokens, setting.chunk)
            + twice * self.request(prompt, 1)
            + (not made) * self.request(prompt, tokens)
            for prompt, tokens, made in sizes
        )

    def starting(self, setting: Setting, *, loaded: bool) -> float:
        """What a setting waits for processes to load the models, if they are not loaded."""
        return self.start * (2 if setting.process == "resumed" else setting.process == "fresh" and not loaded)

    @property
    def pace(self) -> float:
        """Of a setting, for each second that its requests take by themselves."""
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


def measured(generate: Callable[[Request], Any], prompt: list[int], start: float) -> Timing:
    """What a machine takes, told from the beginning of a prompt.

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
    """The settings in an order in which values that none had come soon: by how many of them a second brings."""
    left = [(s, {*s.changed().items()}, seconds(s)) for s in settings]
    found, seen = list[Setting](), set[tuple[str, Value]]()
    while left:
        best = max(left, key=lambda each: (len(each[1] - seen) / each[2], -each[2]))
        left.remove(best)
        found.append(best[0])
        seen |= best[1]
    return found
