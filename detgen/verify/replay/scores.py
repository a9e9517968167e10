"""Derive the lines of a folder of scores from its prompts.

Scores are what canonical passes give for the prompts' tokens, so everything is derived. Under another profile, where
equal bits are not promised, log-probabilities may differ as far as rounding explains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from detgen.engine import Engine
from detgen.engine.request import Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.scored import ScoredSequence
from detgen.outputs.lines import bad_line, output_line
from detgen.program.arrays import Array, array
from detgen.prompts import BadLine
from detgen.verify.replay.comparing import Key, Line, Place, compare_line
from detgen.verify.replay.lines import AHEAD, Replay
from detgen.verify.replay.reading import largest

# By place of a scored token: the error of a difference of logits that the tolerance allows, and the distance of the
# token's logit from the best one, or of the best from the second.
_Errors = dict[Key, dict[int, tuple[float, float]]]


class ScoreReplay(Replay):
    """Derives the lines of scores; see `Replay`."""

    def _check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        source = iter(items)
        while some := list(islice(source, AHEAD)):
            errors: _Errors = {}
            scored = self._score([item for item in some if isinstance(item, ScoreRequest) and self._came(item)], errors)
            for item in some:
                if isinstance(item, BadLine):
                    self._check_refusal(item.index, bad_line(item))
                    continue
                assert isinstance(item, ScoreRequest)
                if (scores := scored.get(item.index)) is None:
                    self._result.missing += item.samples
                elif (why := self._refused(item, scores[0].error if scores[0].refused else None)) is not None:
                    self._check_refusal(item.index, output_line(self._placed(Score(item, error=why)), self._pieces))
                else:
                    failed = False
                    for score in scores:
                        failed |= self._compare(self._placed(score), errors)
                        yield
                    self.totals.errors += failed
                    self.totals.answers.add(item, scores)

    def _refusal(self, engine: Engine, request: Request) -> str | None:
        assert isinstance(request, ScoreRequest)
        (score, *_) = engine.score(request)
        return score.error if score.refused else None

    def _came(self, request: ScoreRequest) -> bool:
        """Return whether the run may have reached a prompt; one that was not stopped has reached all."""
        if self._kept is None or self._outputs.peek() is not None:
            return True
        return any(self._kept.lines(request, sample) is not None for sample in request.wanted)

    def _score(self, requests: list[ScoreRequest], errors: _Errors) -> dict[int, list[Score]]:
        """Return scores of requests by index; `errors` receives what rounding explains, under another profile."""

        def trace(seq: ScoredSequence, first: int, rows: Array) -> None:
            logits, tokens = array(rows), seq.scored[first : first + len(rows)]
            second, best = np.partition(logits, -2, axis=1)[:, -2:].T
            own = logits[np.arange(len(logits)), tokens]
            with np.errstate(invalid="ignore"):  # if logits are infinite
                apart = np.where(own == best, best - second, best - own)
            error = 2 * self._tolerance * largest(logits)
            found = errors.setdefault((seq.request.index, seq.sample), {})
            found.update(enumerate(zip(error.tolist(), apart.tolist(), strict=True), seq.first + first))

        found: dict[int, list[Score]] = {request.index: [] for request in requests}
        for scores in self._engine.score_stream(requests, trace if self._tolerance else None):
            for score in scores:
                found[score.request.index].append(score)
        return {index: sorted(own, key=lambda score: score.sample) for index, own in found.items()}

    def _compare(self, score: Score, errors: _Errors) -> bool:
        """Compare the line of a score. Return whether its line says that it ended with an error."""
        key = (score.request.index, score.sample)
        derived = output_line(score, self._pieces).encode()
        line = self._take(key)
        if self._kept is not None:
            kept = self._kept.lines(score.request, score.sample)
            if line is None and kept is None:
                self._result.missing += 1
                return False
            if kept is not None:
                kept.check(key, (derived, b""), self._result)
        elif line is None:
            return False
        self._result.samples += 1
        self._result.tokens += len(score.token_ids)
        if line is None:
            return False
        self.totals.prompts += score.sample == 0
        self.totals.add(score)
        compare_line(line, derived, self._result, _Rounded(line, errors.get(key, {})))
        return score.error is not None


class _Rounded:
    """Judges what rounding explains in the line of a score."""

    def __init__(self, line: Line, errors: dict[int, tuple[float, float]]) -> None:
        self._line, self._errors = line.fields, errors

    def __call__(self, path: Place, found: Any, wanted: Any, line: dict[str, Any]) -> str | None:
        """See `Allow`. Sums may be those of the line's own tokens."""
        theirs: Any = self._line.get("logprobs")
        if not self._errors:
            return None
        if path[0] == "logprobs" and len(path) > 1:
            return "tie" if _close(found, wanted, *self._errors[path[1]]) else None
        try:
            if path == ("logprob",):
                return "free" if found == math.fsum(each["logprob"] for each in theirs) else None
            if path == ("is_greedy",):
                return "free" if found is all(each["greedy"] for each in theirs) else None
        except (TypeError, KeyError):
            pass
        return None


def _close(written: Any, wanted: dict[str, Any], error: float, apart: float) -> bool:
    """Return whether rounding explains a line's values for a token."""
    if not isinstance(written, dict) or written.keys() != wanted.keys() or written["token"] != wanted["token"]:
        return False
    was, now = written["logprob"], wanted["logprob"]
    if type(was) is not float or type(now) is not float or not abs(was - now) <= error:
        return False
    return written["greedy"] is wanted["greedy"] or (type(written["greedy"]) is bool and apart <= error)
