"""How long a run will still take, from tokens: those that it has made, and those that are likely to come."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import pairwise

from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.engine.stats import EngineStats

_FIXED = 0.5  # of what a round of a full batch takes: what one of a single sample would, before that is known
_ROUNDS = 8.0  # that this belief counts for
_LATELY, _LATE = 10.0, 0.25  # seconds, or the share of those so far, in which what a round says fades to a third
_SHARE = 0.05  # of all tokens that rounds without prompts must have made, for a token's price to be taken from them


@dataclass(slots=True)
class _Rounds:
    """Sums over some rounds, of which the latest count most: a machine may be busier than it was."""

    count: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    live: float = 0.0
    squares: float = 0.0  # of live
    products: float = 0.0  # of live and seconds

    def add(self, seconds: float, tokens: int, live: int) -> None:
        """Count one more."""
        for each, more in zip(fields(self), (1, seconds, tokens, live, live * live, live * seconds), strict=True):
            setattr(self, each.name, getattr(self, each.name) + more)

    def fade(self, share: float) -> None:
        """Let all of them count that much of what they did."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) * share)


# The share of samples that are longer than so many tokens, from that length on.
_Survival = list[tuple[float, float]]


@dataclass(slots=True)
class TimeLeft:
    """Estimates the seconds that are left, while requests are asked for and samples finish.

    Samples that run are longer than they are now, and the first to finish are short. So lengths are those of the
    product-limit estimate (Kaplan and Meier, 1958), in which a sample that runs counts as far as it is known to run.
    All that run count as equally long, since only the sum of their tokens is known.

    A round takes some time for itself and some for each sample that runs; the line is fitted to rounds that read no
    prompt. A token of a prompt takes what the other rounds took besides. When no sample is left to begin, fewer and
    fewer run: there are as many rounds as the longest of them needs.
    """

    _lengths: Counter[int] = field(default_factory=Counter)  # of samples that have finished
    _samples: int = 0  # asked for
    _requests: int = 0
    _limits: int = 0  # tokens that all samples may have, in sum
    _width: int = 1  # most samples that ran at a time
    _tokens: int = 0
    _prompt_tokens: int = 0
    _seconds: float = 0.0
    _reading: _Rounds = field(default_factory=_Rounds)  # rounds that read prompts
    _pure: _Rounds = field(default_factory=_Rounds)  # the others
    _read: float = 0.0  # tokens of prompts, of which the latest count most
    _seen: tuple[float, int, int, int] = (0.0, 0, 0, 0)

    def ask(self, request: Request, seconds: float, stats: EngineStats) -> None:
        """Note a request that will run; before the first one, `seconds` have passed in which nothing was generated."""
        if not self._requests:
            self._seen = seconds, stats.tokens, stats.prompt_tokens, stats.live
        self._requests += 1
        self._samples += request.samples
        self._limits += request.samples * request.params.max_tokens

    def finish(self, done: Completion | Score) -> None:
        """Note a sample that has finished, or a request that was refused with all of its samples."""
        if done.refused:
            self._samples -= done.request.samples
            self._limits -= done.request.samples * done.request.params.max_tokens
        else:
            self._lengths[len(done.token_ids)] += 1

    def spend(self, seconds: float, stats: EngineStats) -> None:
        """Note a round, after which `seconds` have passed since the run began."""
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
        """The seconds left.

        Args:
            unread: requests that have not been asked for; None if that is unknown.
            live: samples that run.

        Returns:
            None where it cannot be told: nothing was generated, or there is nothing left.
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
        last = rest if not to_begin else _residual(survival)  # tokens that the last samples have still to make
        many = min(self._width, to_begin + live)
        rounds = max(0.0, tokens - many * _mean(last)) / self._width + _longest(last, many)
        return prompts + sample * tokens + alone * rounds

    def _prices(self) -> tuple[float, float, float]:
        """Seconds for each token of the longest sample, for each token of all samples, and for each of a prompt."""
        reading, pure = self._reading, self._pure
        tokens, seconds = reading.tokens + pure.tokens, reading.seconds + pure.seconds
        if not pure.tokens or pure.tokens < _SHARE * tokens:  # prompts are read all the time
            return 0.0, seconds / tokens if tokens else self._seconds / self._tokens, 0.0
        round_, live = pure.seconds / pure.count, pure.live / pure.count
        believed = (1 - _FIXED) * round_ / live
        spread = pure.squares - pure.count * live * live
        weight = _ROUNDS * live * live / 12  # the spread of so many rounds whose numbers are even
        sample = (pure.products - pure.count * live * round_ + weight * believed) / (spread + weight)
        sample = min(max(sample, 0.0), round_ / live)
        each = pure.tokens / pure.live  # tokens that a sample makes in a round
        alone, sample = (round_ - sample * live) / each, sample / each
        besides = reading.seconds - pure.seconds * reading.tokens / pure.tokens
        return alone, sample, max(0.0, besides) / self._read if self._read else 0.0

    def _survival(self, live: int) -> tuple[_Survival, float]:
        """The estimate of the lengths, and the length that those that run have now."""
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
            # Those that run are longer than all that have finished: they go on as likely as any has gone on so far.
            rest = max(0.0, self._limits / self._samples - now)
            steps.append((now + (min(rest, (made + live * now) / finished) if finished else rest), 0.0))
        return steps, now


def _mean(survival: _Survival) -> float:
    """The mean length: the area below the curve."""
    return sum(share * (end - start) for (start, share), (end, _) in pairwise(survival))


def _beyond(survival: _Survival, now: float) -> _Survival:
    """The lengths behind the first `now` tokens, of those that have so many."""
    share = next(share for length, share in reversed(survival) if length <= now)
    if not share:
        return [(0.0, 0.0)]
    return [(0.0, 1.0), *((length - now, other / share) for length, other in survival if length > now)]


def _residual(survival: _Survival) -> _Survival:
    """What samples have still to make that run at any moment, while others take the places of those that finish."""
    whole = _mean(survival)
    steps, left = [], whole
    for (start, share), (end, _) in pairwise(survival):
        steps.append((start, left / whole if whole else 0.0))
        left -= share * (end - start)
    return [*steps, (survival[-1][0], 0.0)]


def _longest(survival: _Survival, many: float) -> float:
    """The mean length of the longest of many samples."""
    return sum(
        (1 - math.pow(1 - min(share, 1.0), many)) * (end - start) for (start, share), (end, _) in pairwise(survival)
    )
