"""The tokens of known completions, judged at the speed of reading a prompt.

All tokens are known, so prompt and completion go through canonical passes like a prompt: many positions per pass, many
samples side by side. Each committed token must be what its logits, parameters and noise give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.audit.ties import rounding_explains
from detgen.engine import Engine
from detgen.engine.logprobs import token_logprobs
from detgen.engine.request import TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.kernels.judging import judge_rows
from detgen.kernels.sampling import Choice, choose, scores
from detgen.passes.forward import Forward
from detgen.passes.packing import Shapes, Window
from detgen.passes.pages import PAGE

_AHEAD = 256  # samples that are read and sorted at a time
_PAGES = 512  # most pages that samples side by side take; more would take memory and save no pass


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token that is not what the canonical logits give.

    Attributes:
        position: index in the completion.
        token: what the run committed.
        expected: what the logits give.
        margin: score of the expected token less that of the committed one (logits at temperature 0, else perturbed
            log-probabilities); inf where a filter drops the committed one.
        tie: whether an error within the sample's tolerance explains the token.
    """

    position: int
    token: int
    expected: int
    margin: float
    tie: bool


@dataclass(slots=True)
class Audited:
    """A sample to be judged, and the verdict.

    Attributes:
        sequence: before its first token.
        tokens: its completion as the run wrote it, ids of the vocabulary.
        label: whatever the caller knows it by.
        logprobs: as the run wrote them, one per token; None if there are none.
        tolerance: error of another profile's logits, as a share of a row's largest; 0 where bit equality is promised.
        scores: log-probability and margin of each token as the acceptance log has them; None if it is not to be judged.
        mismatches: filled by `judge`.
        wrong_logprobs: likewise, in words, and whether the tolerance explains it; of tokens that are right.
        wrong_scores: likewise, of the acceptance log.
    """

    sequence: Sequence
    tokens: list[int]
    label: str = ""
    logprobs: list[TokenLogprobs] | None = None
    tolerance: float = 0.0
    scores: list[tuple[float | None, float | None]] | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    wrong_logprobs: list[tuple[str, bool]] = field(default_factory=list)
    wrong_scores: list[tuple[str, bool]] = field(default_factory=list)

    def choice(self, place: int) -> Choice:
        """How the token at a place of the completion is chosen."""
        return self.sequence.choice(place, self.tokens)


@dataclass(slots=True)
class _Reading:
    """A sample in a slot, and the tokens whose logits choose its completion."""

    audited: Audited
    slot: int
    tokens: list[int]

    def window(self, start: int, width: int) -> Window:
        """The next tokens; logits are wanted of those that choose a token of the completion."""
        part = self.tokens[start : start + width]
        first = self.audited.sequence.prompt_length - 1
        return Window(self.slot, start, part, max(min(start + len(part) - first, len(part)), 0))

    def place(self, window: Window) -> int:
        """The place in the completion of the first token that a window's logits choose."""
        return window.start + len(window.tokens) - window.logits - self.audited.sequence.prompt_length + 1


def judge(engine: Engine, samples: Iterable[Audited]) -> Iterator[Audited]:
    """Judge samples as they come.

    Args:
        engine: what its cache holds is lost.
        samples: each with at least one token, and no more than it may have.

    Yields:
        Each sample once it has been read, the longest of the next few hundred first.
    """
    pages = engine.canonical[0].cache.pages
    source = iter(samples)
    while some := list(itertools.islice(source, _AHEAD)):
        some.sort(key=lambda a: a.sequence.prompt_length + len(a.tokens), reverse=True)
        while some:
            longest = some[0].sequence.prompt_length + len(some[0].tokens)
            slots = min(max(min(pages.count, _PAGES) // -(-longest // PAGE), 1), len(some))
            pages.lay_out(slots, longest)
            _share(engine, some[:slots])
            yield from some[:slots]
            del some[:slots]


def _share(engine: Engine, samples: list[Audited]) -> None:
    """Read samples, the longest first; if there are enough and the model allows it, each thread reads a share of them.

    A thread with passes of its own never waits for the others between two operators.
    """
    forward, shapes = engine.canonical
    threads = torch.get_num_threads()
    workers = threads if forward.model.concurrent and len(samples) >= threads else 1
    shares = []
    slot = 0
    for i in range(workers):  # the slots of a share are neighbours
        share = samples[i::workers]
        tokens = [[*a.sequence.tokens, *a.tokens[:-1]] for a in share]
        shares.append([_Reading(a, slot + j, t) for j, (a, t) in enumerate(zip(share, tokens, strict=True))])
        slot += len(share)
    stopped = Event()
    if workers == 1:
        _judge(forward, shapes, shares[0], stopped)
        return

    def work(share: list[_Reading]) -> None:
        torch.set_num_threads(1)
        _judge(forward.counting(), shapes, share, stopped)

    try:
        with ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(work, shares))
            finally:
                stopped.set()  # an interruption does not wait for whole shares
    finally:
        torch.set_num_threads(threads)


def _judge(forward: Forward, shapes: Shapes, readings: list[_Reading], stopped: Event) -> None:
    """Read samples, the longest first, all up to the same position before any goes on.

    The windows of a pass then begin at the same position, so that one attention tile holds them almost without padding.
    The rows that remain go to the next ones.
    """
    read: list[tuple[_Reading, Window]] = []
    remaining = shapes.most_rows
    for reading, window in _windows(readings, shapes.most_rows):
        if len(window.tokens) > remaining or any(r is reading for r, _ in read):
            if stopped.is_set():
                return
            _pass(forward, shapes, read)
            read, remaining = [], shapes.most_rows
        read.append((reading, window))
        remaining -= len(window.tokens)
    if read and not stopped.is_set():
        _pass(forward, shapes, read)


def _windows(readings: list[_Reading], most: int) -> Iterator[tuple[_Reading, Window]]:
    """All windows in the order in which they are read; the fewer samples go on, the longer, up to `most` tokens."""
    start = 0
    while readings:
        width = most // min(len(readings), -(-most // PAGE))
        for reading in readings:
            yield reading, reading.window(start, width)
        start += width
        readings = [r for r in readings if len(r.tokens) > start]


@torch.inference_mode()
def _pass(forward: Forward, shapes: Shapes, read: list[tuple[_Reading, Window]]) -> None:
    """One pass, and what its logits give beside what was written."""
    broken: list[int] = []
    logits = forward.run([w for _, w in read], shapes, broken)
    _check_finite(broken, read)
    wanted = [(r.audited, r.place(w), w.logits) for r, w in read if w.logits]
    if not wanted:
        return
    committed = torch.tensor([t for a, place, count in wanted for t in a.tokens[place : place + count]])
    choices = [a.choice(place + i) for a, place, count in wanted for i in range(count)]
    picked = choose(logits, choices)
    right = picked.tokens.cpu() == committed
    if not right.all():
        places = [(a, place + i) for a, place, count in wanted for i in range(count)]
        for i in (~right).nonzero()[:, 0].tolist():
            audited, place = places[i]
            audited.mismatches.append(_mismatch(logits[i], audited, place, int(picked.tokens[i])))
    errors = None
    if any(a.tolerance for a, _, _ in wanted):
        errors = logits.abs().masked_fill_(~logits.isfinite(), 0).amax(-1)  # the logits will be overwritten
    logprobs, values, leads = judge_rows(logits, picked, full=any(a.logprobs is not None for a, _, _ in wanted))
    chosen, margins = values.tolist(), [None if math.isinf(lead) else lead for lead in leads.tolist()]
    at = 0
    for audited, place, count in wanted:
        part = slice(at, at + count)
        if np.isnan(chosen[part]).any():
            _should_have_failed(audited, f"the logits of token {place + int(np.isnan(chosen[part]).argmax())}")
        error = (audited.tolerance * errors[part]).tolist() if errors is not None else [0.0] * count
        given = _Given(
            None if logprobs is None else logprobs[part], chosen[part], margins[part], right[part].tolist(), error
        )
        if audited.scores is not None:
            _check_scores(audited, place, given)
        if audited.logprobs is not None and given.logprobs is not None:
            _check_logprobs(audited, place, given.logprobs, given)
        at += count


def _check_finite(broken: list[int], read: list[tuple[_Reading, Window]]) -> None:
    """Note the samples that have one of the `broken` rows of a pass."""
    if not broken:
        return
    row = 0
    for reading, window in read:
        at = next((i - row for i in broken if row <= i < row + len(window.tokens)), None)
        if at is not None:
            _should_have_failed(reading.audited, f"the hidden states at position {window.start + at}")
        row += len(window.tokens)


def _should_have_failed(audited: Audited, where: str) -> None:
    what = f"{where} are not finite, so the sample should have ended with an error"
    audited.wrong_logprobs.append((what, False))


class _Given(NamedTuple):
    """What the logits of some consecutive tokens give.

    Attributes:
        logprobs: float32 [tokens, vocabulary]; None if none are to be checked.
        chosen: log-probability of each chosen token.
        margins: of each chosen token; None where there was no other candidate.
        right: whether the token is the chosen one; only then the others are compared.
        errors: largest error of differences of logits that the tolerance allows.
    """

    logprobs: torch.Tensor | None
    chosen: list[float]
    margins: list[float | None]
    right: list[bool]
    errors: list[float]


def _check_scores(audited: Audited, place: int, given: _Given) -> None:
    """Log-probabilities and margins of the acceptance log beside what the logits give."""
    written = (audited.scores or [])[place : place + len(given.chosen)]
    expected = list(zip(given.chosen, given.margins, strict=True))
    if _same_bits(written, expected):
        return
    temperature = audited.sequence.request.params.temperature or 1.0
    filtered = audited.sequence.choice().filtered
    for i, (was, now) in enumerate(zip(written, expected, strict=True)):
        if not given.right[i] or _same_bits([was], [now]):
            continue
        what = f"logprob and margin are {was[0]} and {was[1]}, the logits give {now[0]} and {now[1]}"
        pairs = list(zip(was, now, strict=True))
        apart = [0.0 if _same_bits([a], [b]) else abs(_finite(a) - _finite(b)) for a, b in pairs]
        # A margin is a difference of logits / temperature, and a filter may have dropped another runner-up.
        adjustment = audited.choice(place + i).adjustment
        stretched = 2 * given.errors[i] * (adjustment.stretch if adjustment is not None else 1.0)
        allowed = [2 * given.errors[i], math.inf if filtered else stretched / temperature]
        tie = audited.tolerance > 0 and all(a <= b for a, b in zip(apart, allowed, strict=True))
        audited.wrong_scores.append((f"token {place + i}: {what}", tie))


def _check_logprobs(audited: Audited, place: int, logprobs: torch.Tensor, given: _Given) -> None:
    """Log-probabilities of the output line beside what the logits give."""
    written = (audited.logprobs or [])[place : place + len(given.chosen)]
    expected = token_logprobs(logprobs, given.chosen, audited.sequence.request.params.logprobs or 0)
    for i, (a, b) in enumerate(zip(written, expected, strict=True)):
        same = a == b and _same_bits([a.logprob, *(p for _, p in a.top)], [b.logprob, *(p for _, p in b.top)])
        if given.right[i] and not same:
            what = f"the logprob is {a.logprob!r}, the logits give {b.logprob!r}"
            if a.logprob == b.logprob:
                what = "the most likely tokens are others"
            tie = audited.tolerance > 0 and _distance(a, b) <= 2 * given.errors[i]
            audited.wrong_logprobs.append((f"token {place + i}: {what}", tie))


def _same_bits(written: list[Any], expected: list[Any]) -> bool:
    """Whether floats are equal bit for bit; None is as good as what is not finite, which JSON cannot spell."""
    a, b = (np.array(values, dtype=np.float64) for values in (written, expected))
    a[~np.isfinite(a)] = b[~np.isfinite(b)] = math.nan
    return a.tobytes() == b.tobytes()


def _finite(value: float | None) -> float:
    """A value for comparing within a tolerance: nothing is far from everything."""
    return math.inf if value is None or not math.isfinite(value) else value


def _distance(a: TokenLogprobs, b: TokenLogprobs) -> float:
    """The largest difference of the values at the same rank; inf if one has more of them."""
    if len(a.top) != len(b.top):
        return math.inf
    tops = [abs(p - q) for (_, p), (_, q) in zip(a.top, b.top, strict=True)]
    return max([abs(a.logprob - b.logprob), *tops])


def _error(row: torch.Tensor, audited: Audited) -> float:
    """The largest error of differences of a row's logits, float32 [vocabulary], that the tolerance allows."""
    finite = row[row.isfinite()].abs()
    return audited.tolerance * float(finite.max()) if len(finite) else 0.0


def _mismatch(row: torch.Tensor, audited: Audited, place: int, expected: int) -> Mismatch:
    """A token beside what its logits, float32 [vocabulary], give."""
    token = audited.tokens[place]
    choice = audited.choice(place)
    score = scores(row, choice)
    tie = audited.tolerance > 0 and rounding_explains(row, choice, token, _error(row, audited))
    return Mismatch(place, token, expected, float(score[expected] - score[token]), tie)
