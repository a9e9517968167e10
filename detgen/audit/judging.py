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

import torch

from detgen.audit.ties import rounding_explains
from detgen.engine import Engine
from detgen.engine.logprobs import token_logprobs
from detgen.engine.request import TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.kernels.attention import BLOCK
from detgen.kernels.sampling import Choice, choose, scores
from detgen.passes.forward import Forward
from detgen.passes.packing import Shapes, Window

_AHEAD = 256  # samples that are read and sorted at a time


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
        mismatches: filled by `judge`.
        wrong_logprobs: likewise, in words, and whether the tolerance explains it; of tokens that are right.
    """

    sequence: Sequence
    tokens: list[int]
    label: str = ""
    logprobs: list[TokenLogprobs] | None = None
    tolerance: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)
    wrong_logprobs: list[tuple[str, bool]] = field(default_factory=list)

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
    cache, shapes = engine.canonical[0].cache, engine.canonical[1]
    source = iter(samples)
    while some := list(itertools.islice(source, _AHEAD)):
        some.sort(key=lambda a: a.sequence.prompt_length + len(a.tokens), reverse=True)
        while some:
            slot_size = shapes.fit_keys(some[0].sequence.prompt_length + len(some[0].tokens))
            slots = min(max(cache.positions // slot_size, 1), len(some))
            cache.partition(slot_size, slots)
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

    The windows of a pass then begin at the same position in neighbouring slots, so that one attention tile holds them
    almost without padding. The rows that remain go to the next ones.
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
        width = most // min(len(readings), -(-most // BLOCK))
        for reading in readings:
            yield reading, reading.window(start, width)
        start += width
        readings = [r for r in readings if len(r.tokens) > start]


def _pass(forward: Forward, shapes: Shapes, read: list[tuple[_Reading, Window]]) -> None:
    """One pass, and its choices beside the tokens that were committed."""
    logits = forward.run([w for _, w in read], shapes)
    wanted = [(r, r.place(w), w.logits) for r, w in read if w.logits]
    if not wanted:
        return
    committed = torch.tensor([t for r, place, count in wanted for t in r.audited.tokens[place : place + count]])
    choices = [r.audited.choice(place + i) for r, place, count in wanted for i in range(count)]
    picked = choose(logits, choices).tokens
    wrong = (picked != committed.to(picked.device)).nonzero()[:, 0].tolist()
    at = 0
    for r, place, count in wanted:
        if r.audited.logprobs is not None:
            _check_logprobs(logits[at : at + count], picked[at : at + count], r.audited, place)
        at += count
    if not wrong:
        return
    places = [(r.audited, place + i) for r, place, count in wanted for i in range(count)]
    for i in wrong:
        audited, place = places[i]
        audited.mismatches.append(_mismatch(logits[i], audited, place, int(picked[i])))


def _check_logprobs(logits: torch.Tensor, picked: torch.Tensor, audited: Audited, place: int) -> None:
    """Log-probabilities beside what logits, float32 [rows, vocabulary], give for the tokens picked by them."""
    written = (audited.logprobs or [])[place : place + len(logits)]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, picked[:, None])[:, 0].tolist()
    expected = token_logprobs(logprobs, chosen, audited.sequence.request.params.logprobs or 0)
    tokens = audited.tokens[place : place + len(logits)]
    for i, (a, b, token, best) in enumerate(zip(written, expected, tokens, picked.tolist(), strict=True)):
        if token == best and a != b:
            what = f"the logprob is {a.logprob!r}, the logits give {b.logprob!r}"
            if a.logprob == b.logprob:
                what = "the most likely tokens are others"
            tie = audited.tolerance > 0 and _distance(a, b) <= 2 * _error(logits[i], audited)
            audited.wrong_logprobs.append((f"token {place + i}: {what}", tie))


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
