"""Samples whose tokens are known, read by canonical passes: what their logits give, token by token.

All tokens are known, so prompt and completion are read as those of a score are (`Engine.score_stream`): many positions
a pass, what samples have in common once. Each committed token must be what its logits, parameters and noise give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from detgen.engine import Engine
from detgen.engine.request import Request, TokenLogprobs
from detgen.engine.score_requests import ScoreRequest
from detgen.engine.scored import ScoredSequence
from detgen.engine.sequence import Sequence
from detgen.engine.token_logprobs import token_logprobs
from detgen.errors import RequestError
from detgen.kernels.logprobs import Judged, judge_rows
from detgen.kernels.sampling import Choice, choose, scores
from detgen.program.arrays import Array, array
from detgen.verify.replay.ties import largest, rounding_explains

_Known = TypeVar("_Known", bound="Known")


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
            self.tops += token_logprobs(judged.logprobs, judged.chosen, wanted or 0)
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
