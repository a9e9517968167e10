"""What the settings of a check will take, told from its first prompt and from the settings that ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from detgen.check.axes import Setting, Value
from detgen.check.budget import Costs
from detgen.check.running import Task, size
from detgen.engine.request import Request
from detgen.params import SamplingParams

if TYPE_CHECKING:
    from detgen.check.checking import Check

_READ, _TIMED = 64, 8  # tokens that are read, and generated, to see how long one takes


class Timing:
    """Times a prompt, and then the settings.

    Args:
        check: whose settings they are.
        request: its beginning is continued, to see how fast that is.
        until: when that must be done, as `time.monotonic`.
        start: seconds that a process took to load the models.

    Raises:
        OutOfTime: it is not.
    """

    def __init__(self, check: Check, request: Request, until: float, start: float) -> None:
        self._check, self._start = check, start
        self._lengths: dict[str | int, int] = {}  # tokens of prompts
        engine, seconds = check.subject.engine(), list[float]()
        prompt = tuple(engine.encode(request)[:_READ])
        for tokens in (1, 1, 1 + _TIMED):  # the first time takes longer
            timed = Request(0, "timed", token_ids=prompt, params=SamplingParams(max_tokens=tokens, ignore_eos=True))
            began = time.monotonic()
            check.subject.generate(Task(Setting(), [timed], [], 0, thinks=engine.thinks), until)
            seconds.append(time.monotonic() - began)
        token = max((seconds[2] - seconds[1]) / _TIMED, 1e-5)
        self._costs = Costs(max(seconds[1] - token, 0.0) / len(prompt), token)
        self._began: tuple[float, float] | None = None  # when a setting began, and what its requests take alone

    def fitting(self, requests: list[Request], until: float) -> tuple[int, int]:
        """How many of the first requests, and how many new tokens of each at most, leave the settings time.

        Raises:
            OutOfTime: not even a few do.
        """
        sizes = [(self._length(r), r.params.max_tokens, r.params.n) for r in requests]
        return self._costs.fitting(sizes, until - time.monotonic())

    def can_start(self, left: float) -> bool:
        """Whether there is time to load the models in another process and to use it."""
        return 2 * self._start < left

    def quickest(self, settings: list[Setting]) -> list[Setting]:
        """The settings in an order in which values that none had come soon: by how many of them a second brings."""
        left = [(s, {*s.changed().items()}, self._alone(s) + self._starting(s)) for s in settings]
        found, seen = list[Setting](), set[tuple[str, Value]]()
        while left:
            best = max(left, key=lambda each: (len(each[1] - seen) / each[2], -each[2]))
            left.remove(best)
            found.append(best[0])
            seen |= best[1]
        return found

    def begin(self, setting: Setting) -> float:
        """Seconds that a setting will take, which begins now."""
        alone, starting = self._alone(setting), self._starting(setting)
        self._began = None if starting else (time.monotonic(), alone)
        return alone * self._costs.pace + starting

    def end(self) -> None:
        """The setting that began has ended."""
        if self._began is not None:
            self._costs.spent += time.monotonic() - self._began[0]
            self._costs.expected += self._began[1]

    def _starting(self, setting: Setting) -> float:
        """Seconds that a setting waits for processes to load the models."""
        fresh = setting.process == "fresh" and not self._check.fresh.loaded(setting.quant)
        return self._start * (2 if setting.process == "resumed" else fresh)

    def _alone(self, setting: Setting) -> float:
        """Seconds that a setting's requests would take one by one, with what is missing of their reference."""
        made = self._check.references.get((setting.quant, setting.sampling), {})
        twice = setting.prefix_cache in ("warm", "shared")
        total = 0.0
        for r in self._check.pool.watched(setting):
            prompt, seen = self._length(r), made.get((r.id, 0))
            tokens = r.params.n * (r.params.max_tokens if seen is None else len(seen.tokens))
            total += self._costs.request(prompt, tokens, setting.chunk)
            total += twice * self._costs.request(prompt, 1) + (seen is None) * self._costs.request(prompt, tokens)
        return total

    def _length(self, request: Request) -> int:
        """Tokens of a prompt, at least 1."""
        if request.id not in self._lengths:
            self._lengths[request.id] = max(size(self._check.subject.engine(), request)[0], 1)
        return self._lengths[request.id]
