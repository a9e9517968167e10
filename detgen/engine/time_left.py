"""Estimates the time that a run still takes, from the tokens that it has made and those that are likely to come."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import pairwise

from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.engine.stats import EngineStats

_FIXED = 0.5  # assumed share of a full batch's round that a round of one sample takes, before it is measured
_ROUNDS = 8.0  # weight of this assumption, in rounds
_LATELY, _LATE = 10.0, 0.25  # seconds, or share of the run so far, in which a round's weight fades to a third
_SHARE = 0.05  # least share of tokens from rounds without prompts for a token's price to be taken from these


@dataclass(slots=True)
class _Rounds:
    """Sums over rounds; the latest rounds count most, since a machine may have become busier."""

    count: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    live: float = 0.0
    squares: float = 0.0  # of live
    products: float = 0.0  # of live and seconds

    def add(self, seconds: float, tokens: int, live: int) -> None:
        """Count one more round."""
        for each, more in zip(fields(self), (1, seconds, tokens, live, live * live, live * seconds), strict=True):
            setattr(self, each.name, getattr(self, each.name) + more)

    def fade(self, share: float) -> None:
        """Multiply the weight of all rounds so far by `share`."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) * share)


# Steps of (length, share of samples that are longer), by length.
_Survival = list[tuple[float, float]]


@dataclass(slots=True)
class TimeLeft:
    """Estimates the seconds left while requests arrive and samples finish.

    Running samples are longer than they are now, and the first to finish are short. So lengths are estimated by the
    product-limit method (Kaplan and Meier, 1958), in which a running sample counts up to its present length. All
    running samples count as equally long, since only the sum of their tokens is known.

    A round has a fixed cost and a cost per running sample; the line is fitted to rounds that read no prompt. The cost
    of a token of a prompt is what the other rounds took beyond that. When no sample is left to begin, fewer and fewer
    run: then there are as many rounds as the longest of them needs.
    """

    _lengths: Counter[int] = field(default_factory=Counter)  # of samples that have finished
    _samples: int = 0  # of all requests so far
    _requests: int = 0
    _limits: int = 0  # sum of the samples' largest token counts
    _width: int = 1  # most samples that ran at a time
    _tokens: int = 0
    _prompt_tokens: int = 0
    _seconds: float = 0.0
    _reading: _Rounds = field(default_factory=_Rounds)  # rounds that read prompts
    _pure: _Rounds = field(default_factory=_Rounds)  # other rounds
    _read: float = 0.0  # tokens of prompts; the latest count most
    _seen: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def ask(self, request: Request, seconds: float, stats: EngineStats) -> None:
        """Record a request that will run; before the first one, `seconds` have passed without any generation."""
        if not self._requests:
            self._seen = seconds, stats.tokens, stats.prompt_tokens, stats.live
        self._requests += 1
        self._samples += request.samples
        self._limits += request.samples * request.params.max_tokens

    def finish(self, done: Completion | Score) -> None:
        """Record a sample that has finished, or a request that was refused with all of its samples."""
        if done.refused:
            self._samples -= done.request.samples
            self._limits -= done.request.samples * done.request.params.max_tokens
        else:
            self._lengths[len(done.token_ids)] += 1

    def spend(self, seconds: float, stats: EngineStats) -> None:
        """Record a round, after which `seconds` have passed since the run began."""
        before, tokens, prompt_tokens, live = self._seen
        took, made, read = seconds - before, stats.tokens - tokens, stats.prompt_tokens - prompt_tokens
        live = max(live, stats.live, 1)
        self._seconds, self._tokens = self._seconds + took, self._tokens + made
        self._prompt_tokens += read
        faded = math.exp(-took / max(_LATELY, self._seconds * _LATE))
        self._reading.fade(faded)
        self._pure.fade(faded)
        self._read = self._read * faded + read
        (self._reading if read else self._pure).add(took, made, live)
        self._width = max(self._width, live)
        self._seen = seconds, stats.tokens, stats.prompt_tokens, stats.live

    def left(self, unread: int | None, live: int) -> float | None:
        """Return the seconds left.

        Args:
            unread: number of requests still to come; None if unknown.
            live: number of running samples.

        Returns:
            The seconds; None if they cannot be estimated: nothing was generated yet, or nothing is left.
        """
        begun = self._lengths.total() + live
        if unread is None or not begun or self._samples <= 0 or not self._seconds:
            return None
        to_begin = max(0, self._samples - begun) + unread * self._samples / self._requests
        if not to_begin and not live:
            return None
        if not self._tokens:
            return to_begin * self._seconds / begun
        alone, sample, prompt_token = self._prices()
        prompts = to_begin * prompt_token * self._prompt_tokens / begun
        survival, now = self._survival(live)
        rest = _beyond(survival, now)
        tokens = to_begin * _mean(survival) + live * _mean(rest)
        last = rest if not to_begin else _residual(survival)  # tokens that the last samples still have to make
        many = min(self._width, to_begin + live)
        rounds = max(0.0, tokens - many * _mean(last)) / self._width + _longest(last, many)
        return prompts + sample * tokens + alone * rounds

    def _prices(self) -> tuple[float, float, float]:
        """Return seconds per token: of the longest sample, of all samples, and of prompts."""
        reading, pure = self._reading, self._pure
        tokens, seconds = reading.tokens + pure.tokens, reading.seconds + pure.seconds
        if not pure.tokens or pure.tokens < _SHARE * tokens:  # prompts are read all the time
            return 0.0, seconds / tokens if tokens else self._seconds / self._tokens, 0.0
        round_, live = pure.seconds / pure.count, pure.live / pure.count
        believed = (1 - _FIXED) * round_ / live
        spread = pure.squares - pure.count * live * live
        weight = _ROUNDS * live * live / 12  # the spread of this many rounds with evenly distributed numbers of samples
        sample = (pure.products - pure.count * live * round_ + weight * believed) / (spread + weight)
        sample = min(max(sample, 0.0), round_ / live)
        each = pure.tokens / pure.live  # tokens of a sample in a round
        alone, sample = (round_ - sample * live) / each, sample / each
        besides = reading.seconds - pure.seconds * reading.tokens / pure.tokens
        return alone, sample, max(0.0, besides) / self._read if self._read else 0.0

    def _survival(self, live: int) -> tuple[_Survival, float]:
        """Return the estimate of lengths, and the present length of running samples."""
        finished = self._lengths.total()
        made = sum(length * count for length, count in self._lengths.items())
        now = max(0.0, (self._tokens - made) / live) if live else 0.0
        at_risk, share, passed = finished + live, 1.0, not live
        steps = [(0.0, 1.0)]
        for length, count in sorted(self._lengths.items()):
            if not passed and length > now:
                passed, at_risk = True, at_risk - live
            share *= 1 - count / at_risk
            at_risk -= count
            steps.append((float(length), share))
        if not passed:
            # Running samples are longer than all finished ones: assume that they go on as likely as any sample has so
            # far.
            rest = max(0.0, self._limits / self._samples - now)
            steps.append((now + (min(rest, (made + live * now) / finished) if finished else rest), 0.0))
        return steps, now


def _mean(survival: _Survival) -> float:
    """Return the mean length: the area below the curve."""
    return sum(share * (end - start) for (start, share), (end, _) in pairwise(survival))


def _beyond(survival: _Survival, now: float) -> _Survival:
    """Return the lengths beyond the first `now` tokens, of samples that are longer."""
    share = next(share for length, share in reversed(survival) if length <= now)
    if not share:
        return [(0.0, 0.0)]
    return [(0.0, 1.0), *((length - now, other / share) for length, other in survival if length > now)]


def _residual(survival: _Survival) -> _Survival:
    """Return the remaining lengths of running samples at any time while others replace those that finish."""
    whole = _mean(survival)
    steps, left = [], whole
    for (start, share), (end, _) in pairwise(survival):
        steps.append((start, left / whole if whole else 0.0))
        left -= share * (end - start)
    return [*steps, (survival[-1][0], 0.0)]


def _longest(survival: _Survival, many: float) -> float:
    """Return the mean length of the longest of `many` samples."""
    return sum(
        (1 - math.pow(1 - min(share, 1.0), many)) * (end - start) for (start, share), (end, _) in pairwise(survival)
    )
