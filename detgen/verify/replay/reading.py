"""Read samples whose tokens are known by canonical passes, and compare their logits token by token.

Prompt and completion are read as for a score (`Engine.score_stream`): many positions per pass, and what samples share
only once. Each committed token must be what its logits, parameters and noise give.

Where equal bits are not promised, a token is a tie if logits within an error bound could have given it. Filters are
tested with the worst and the best case for a token. The best case against all filters at once raises the token and
everything below it; the worst case raises everything that is above it or can get there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from detgen.engine import Engine
from detgen.engine.pass_results import token_logprobs
from detgen.engine.request import Request, TokenLogprobs
from detgen.engine.score_requests import ScoreRequest
from detgen.engine.scored import ScoredSequence
from detgen.engine.sequence import Sequence
from detgen.errors import RequestError
from detgen.kernels.filters import kept
from detgen.kernels.logprobs import Judged, judge_rows, most_likely
from detgen.kernels.noise import gumbel, words
from detgen.kernels.penalties import adjusted_row
from detgen.kernels.sampling import Choice, choose, scores
from detgen.program.arrays import Array, array

_Known = TypeVar("_Known", bound="Known")


def largest(logits: Array) -> np.ndarray:
    """Return the largest finite magnitude of each row, float32 [rows]."""
    numbers = array(logits)
    found: np.ndarray = np.abs(np.where(np.isfinite(numbers), numbers, np.float32(0))).max(-1)
    return found


def rounding_explains(logits: Array, choice: Choice, token: int, error: float) -> bool:
    """Return whether a token could be the choice if differences of logits are off by at most `error`.

    It could not if filters drop it in its best case, or if a competitor that they keep even in its own worst case is
    too far ahead.

    Args:
        logits: float32 [vocabulary], not yet adjusted.
        choice: how the token was chosen.
        token: its id.
        error: not negative.
    """
    row = adjusted_row(array(logits), choice.adjustment).astype(np.float64)
    if choice.adjustment is not None:
        error *= choice.adjustment.stretch
    if not np.isfinite([row[token], row.max()]).all():
        return False  # the model rules the token out, or is broken
    if choice.temperature == 0:
        return bool(row[token] >= row.max() - error)
    if token not in kept(_at_best(row, token, error), choice):
        return False
    score = row / choice.temperature + gumbel(words(choice.seed, choice.sample, choice.position, len(row)))
    ahead = np.flatnonzero(score > score[token] + error / choice.temperature)
    if not len(ahead):
        return True
    rival = int(ahead[row[ahead].argmax()])  # if filters can drop this one, they can also drop those with lower logits
    return rival not in kept(_at_worst(row, rival, error), choice)


def _at_best(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Return logits within the error that keep a token if any do: none passes it, and those ahead weigh least."""
    top = row[token] + error
    found = np.where(row > row[token], np.maximum(row, top), row + error)
    found[token] = np.nextafter(top, np.inf)  # ahead of its equals
    return found


def _at_worst(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Return logits within the error that drop a token if any do: every one that can pass it does, and weighs most."""
    found = np.where(row + error >= row[token], np.nextafter(row + error, np.inf), row)
    found[token] = row[token]
    return found


class Mismatch(NamedTuple):
    """How a token differs from what the canonical logits give.

    Attributes:
        expected: the token that the logits give.
        margin: score of the expected token minus that of the committed one (logits at temperature 0, else perturbed
            log-probabilities); inf where a filter drops the committed one.
        tie: whether an error within the tolerance explains the token.
    """

    expected: int
    margin: float
    tie: bool


@dataclass(slots=True)
class Known:
    """A sample whose tokens are known, and what canonical passes give for them.

    Attributes:
        sequence: the sequence before its first token; receives the thoughts of a model that thinks.
        tokens: its completion as the run wrote it, ids of the vocabulary.
        mismatches: tokens that are not what the logits give, by place.
        logprobs: log-probability of each token that the logits give.
        margins: their margins; inf where there was no other candidate.
        tops: log-probabilities as the output has them, if requested.
        errors: for each token, the largest error of a logit that the tolerance allows.
        error: why the sample cannot be a text, or None.
    """

    sequence: Sequence
    tokens: list[int]
    mismatches: dict[int, Mismatch] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    tops: list[TokenLogprobs] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def judged(self) -> Judged:
        """Log-probabilities and margins in the form that the engine's log takes."""
        return Judged(None, np.array(self.logprobs, np.float32), np.array(self.margins, np.float64))

    def choice(self, place: int) -> Choice:
        """Return how the token at a place of the completion is chosen."""
        return self.sequence.choice(place, self.tokens)

    def take(self, logits: Array, tolerance: float) -> None:
        """Record what the logits, float32 [n, vocabulary], of the next tokens give."""
        first, wanted = len(self.logprobs), self.sequence.request.params.logprobs
        picked = choose(logits, [self.choice(first + i) for i in range(len(logits))])
        for i, expected in enumerate(picked.tokens.tolist()):
            if expected != self.tokens[first + i]:
                self.mismatches[first + i] = self._mismatch(array(logits[i]), first + i, expected, tolerance)
        if tolerance:
            self.errors += (tolerance * largest(logits)).tolist()
        judged = judge_rows(logits, picked, whole=None if wanted is None else np.arange(len(logits)))
        if judged.logprobs is not None:
            self.tops += token_logprobs(most_likely(judged.logprobs, wanted or 0), judged.chosen)
        self.logprobs += judged.chosen.tolist()
        self.margins += judged.margins.tolist()

    def _mismatch(self, row: np.ndarray, place: int, expected: int, tolerance: float) -> Mismatch:
        """Compare a token with what its logits, float32 [vocabulary], give."""
        token, choice, finite = self.tokens[place], self.choice(place), np.abs(row[np.isfinite(row)])
        score, error = scores(row, choice), tolerance * float(finite.max()) if len(finite) else 0.0
        tie = tolerance > 0 and rounding_explains(row, choice, token, error)
        return Mismatch(expected, float(score[expected] - score[token]), tie)


def refusal(engine: Engine, request: Request) -> str | None:
    """Return why an engine cannot run a request; None if it can."""
    try:
        engine.sequences(request)
    except RequestError as error:
        return str(error)
    return None


def read(engine: Engine, samples: list[_Known], tolerance: float = 0.0) -> Iterator[_Known]:
    """Read samples by canonical passes.

    Args:
        engine: the engine that reads them.
        samples: samples with at least one token each, and no more than allowed.
        tolerance: error of another profile's logits, as a share of a row's largest; 0 where bit equality is promised.

    Yields:
        Each sample once it has been read, in the order in which they finish.
    """

    def take(seq: ScoredSequence, first: int, logits: Array) -> None:
        sample = samples[seq.request.index]
        if engine.thinking is not None:
            sample.sequence.thoughts = engine.thinking.thoughts[seq.slot]
        if len(logits):
            sample.take(logits, tolerance)

    requests = [
        ScoreRequest(i, i, token_ids=tuple(s.sequence.tokens), completions=(tuple(s.tokens),))
        for i, s in enumerate(samples)
    ]
    for done in engine.score_stream(requests, take):
        for score in done:
            sample = samples[score.request.index]
            sample.error = score.error
            yield sample
