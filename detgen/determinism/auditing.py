"""The tokens of known completions, judged at the speed of reading a prompt.

All tokens are known, so prompt and completion go through canonical passes like a prompt, many positions a pass, many
samples side by side; each committed token must be what its logits, parameters and noise give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from detgen.engine import Engine
from detgen.engine.sequence import Sequence
from detgen.kernels.packing import Window
from detgen.kernels.sampling import Choice, choose, scores

_SLOTS = 64  # most samples that are read at a time


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token that is not what the canonical logits give.

    Attributes:
        position: index in the completion.
        token: what the run committed.
        expected: what the logits give.
        margin: score of the expected token less that of the committed one (logits at temperature 0, else perturbed
            log-probabilities); inf where a filter drops the committed one.
        scale: largest absolute logit of the row, that a tolerance is relative to.
    """

    position: int
    token: int
    expected: int
    margin: float
    scale: float


@dataclass(slots=True)
class Audited:
    """A sample to be judged, and what came of it.

    Attributes:
        sequence: before its first token.
        tokens: its completion as the run wrote it.
        label: whatever the caller knows it by.
        mismatches: filled by `judge`.
    """

    sequence: Sequence
    tokens: list[int]
    label: object = None
    mismatches: list[Mismatch] = field(default_factory=list)


@dataclass(slots=True)
class _Reading:
    """A sample that holds a slot, and how far it is read."""

    audited: Audited
    slot: int
    tokens: list[int]
    at: int = 0


def judge(engine: Engine, samples: Iterable[Audited]) -> Iterator[Audited]:
    """Judge samples as they come.

    Args:
        engine: its cache's contents are forgotten.
        samples: each with at least one token.

    Yields:
        Each sample when it has been read, in no particular order.
    """
    source = iter(samples)
    batch: list[Audited] = []
    for sample in source:
        batch.append(sample)
        if len(batch) == 4 * _SLOTS:
            yield from _judge(engine, batch)
            batch = []
    if batch:
        yield from _judge(engine, batch)


def _judge(engine: Engine, batch: list[Audited]) -> Iterator[Audited]:
    forward, shapes = engine.canonical
    cache = forward.cache
    longest = max(a.sequence.prompt_length + len(a.tokens) for a in batch)
    stride = shapes.fit_keys(longest)
    slots = max(min(_SLOTS, cache.positions // stride), 1)
    cache.partition(stride, slots)
    waiting = [_Reading(a, -1, [*a.sequence.tokens, *a.tokens[:-1]]) for a in reversed(batch)]
    free = list(range(slots))
    live: list[_Reading] = []
    while waiting or live:
        room = shapes.most_rows
        windows, read = [], []
        while room and (live or (waiting and free)):
            reading = live.pop() if live else waiting.pop()
            if reading.slot < 0:
                reading.slot = free.pop()
            part = reading.tokens[reading.at : reading.at + room]
            end = reading.at + len(part)
            judged = min(end - reading.audited.sequence.prompt_length + 1, len(part))
            windows.append(Window(reading.slot, reading.at, part, max(judged, 0)))
            reading.at = end
            room -= len(part)
            read.append(reading)
        _compare(forward.run(windows, shapes), windows, read)
        for reading in read:
            if reading.at == len(reading.tokens):
                free.append(reading.slot)
                yield reading.audited
            else:
                live.append(reading)


def _compare(logits: torch.Tensor, windows: list[Window], read: list[_Reading]) -> None:
    """Compare the choices of a pass's rows with the tokens that were committed."""
    choices: list[Choice] = []
    committed: list[int] = []
    places: list[tuple[_Reading, int]] = []
    for window, reading in zip(windows, read, strict=True):
        first = reading.at - window.logits - reading.audited.sequence.prompt_length + 1
        for place in range(first, first + window.logits):
            choices.append(reading.audited.sequence.choice(place))
            committed.append(reading.audited.tokens[place])
            places.append((reading, place))
    if not choices:
        return
    score = scores(logits, choices)
    picked = choose(score)
    wrong = (picked != torch.tensor(committed, device=picked.device)).nonzero()[:, 0].tolist()
    for i in wrong:
        reading, place = places[i]
        token, expected = committed[i], int(picked[i])
        known = 0 <= token < score.shape[-1]
        margin = float(score[i, expected] - score[i, token]) if known else float("inf")
        scale = float(logits[i].abs().max())
        reading.audited.mismatches.append(Mismatch(place, token, expected, margin, scale))
