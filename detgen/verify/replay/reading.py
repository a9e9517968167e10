"""Samples whose tokens are known, read by canonical passes: what their logits give, token by token.

All tokens are known, so prompt and completion are read as those of a score are (`Engine.score_stream`): many positions
a pass, what samples have in common once. Each committed token must be what its logits, parameters and noise give.

Where bits are not promised, rounding may explain a token: logits that are off by no more than so much could have given
it. Filters are asked about the worst and the best that an error can do to a token. What helps one token most against
all filters at once is to raise it and all that stands below it; what harms it most is to raise all that is above it or
can come there.
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
    """The largest finite magnitude of each row, float32 [rows]."""
    numbers = array(logits)
    found: np.ndarray = np.abs(np.where(np.isfinite(numbers), numbers, np.float32(0))).max(-1)
    return found


def rounding_explains(logits: Array, choice: Choice, token: int, error: float) -> bool:
    """Whether a token could be the choice where differences of logits are off by `error` at most.

    It is not if the filters drop it in the best case, or if a competitor that they keep even in its worst case has a
    score that is too far ahead.

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
        return False  # a token that the model rules out, or a broken model
    if choice.temperature == 0:
        return bool(row[token] >= row.max() - error)
    if token not in kept(_at_best(row, token, error), choice):
        return False
    score = row / choice.temperature + gumbel(words(choice.seed, choice.sample, choice.position, len(row)))
    ahead = np.flatnonzero(score > score[token] + error / choice.temperature)
    if not len(ahead):
        return True
    rival = int(ahead[row[ahead].argmax()])  # if filters can drop this one, they can drop those with lower logits, too
    return rival not in kept(_at_worst(row, rival, error), choice)


def _at_best(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Logits within the error that keep a token if any do: nothing passes it, and what it is behind weighs least."""
    top = row[token] + error
    found = np.where(row > row[token], np.maximum(row, top), row + error)
    found[token] = np.nextafter(top, np.inf)  # ahead of its equals
    return found


def _at_worst(row: np.ndarray, token: int, error: float) -> np.ndarray:
    """Logits within the error that drop a token if any do: whatever can pass it does, and weighs most."""
    found = np.where(row + error >= row[token], np.nextafter(row + error, np.inf), row)
    found[token] = row[token]
    return found


class Mismatch(NamedTuple):
    """What stands in the place of a token that is not what the canonical logits give.

    Attributes:
        expected: what the logits give.
        margin: score of the expected token less that of the committed one (logits at temperature 0, else perturbed
            log-probabilities); inf where a filter drops the committed one.
        tie: whether an error within the tolerance explains the token.
    """

    expected: int
    margin: float
    tie: bool


@dataclass(slots=True)
class Known:
    """A sample whose tokens are known, and what canonical passes say of it.

    Attributes:
        sequence: before its first token; gets the thoughts of a model that thinks.
        tokens: its completion as the run wrote it, ids of the vocabulary.
        mismatches: the tokens that are not what the logits give, by place.
        logprobs: log-probability of each token that the logits give.
        margins: of each of them; inf where there was no other candidate.
        tops: log-probabilities as the output has them, if the request asks for them.
        errors: the largest error of a difference of a token's logits that the tolerance allows.
        error: why the sample cannot be a text; None if it can.
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
        """Log-probabilities and margins, as the engine's log takes them."""
        return Judged(None, np.array(self.logprobs, np.float32), np.array(self.margins, np.float64))

    def choice(self, place: int) -> Choice:
        """How the token at a place of the completion is chosen."""
        return self.sequence.choice(place, self.tokens)

    def take(self, logits: Array, tolerance: float) -> None:
        """Note what the logits, float32 [n, vocabulary], of the next tokens give."""
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
        """A token beside what its logits, float32 [vocabulary], give."""
        token, choice, finite = self.tokens[place], self.choice(place), np.abs(row[np.isfinite(row)])
        score, error = scores(row, choice), tolerance * float(finite.max()) if len(finite) else 0.0
        tie = tolerance > 0 and rounding_explains(row, choice, token, error)
        return Mismatch(expected, float(score[expected] - score[token]), tie)


def refusal(engine: Engine, request: Request) -> str | None:
    """Why an engine cannot run a request; None if it can."""
    try:
        engine.sequences(request)
    except RequestError as error:
        return str(error)
    return None


def read(engine: Engine, samples: list[_Known], tolerance: float = 0.0) -> Iterator[_Known]:
    """Read samples.

    Args:
        engine: reads them.
        samples: each with at least one token, and no more than it may have.
        tolerance: error of another profile's logits, as a share of a row's largest; 0 where bit equality is promised.

    Yields:
        Each sample once it has been read, in the order in which they end.
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
