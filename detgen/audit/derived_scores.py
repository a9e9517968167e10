"""The lines of a folder of scores, derived again from its prompts, beside those that are there.

A score is what canonical passes say of tokens that the prompts give, so everything is derived, and compared byte for
byte. Under another profile bits are not promised: then log-probabilities may differ as far as rounding explains it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from detgen.audit.line_differences import compare_line
from detgen.audit.result import AuditResult
from detgen.audit.run_files import Key, Line, Lines, in_words
from detgen.audit.stopped import Find, check_kept, output_of
from detgen.engine import Engine
from detgen.engine.request import Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.scored import ScoredSequence
from detgen.errors import CheckError, EngineError
from detgen.outputs import Totals, dump
from detgen.outputs.lines import bad_line, output_line
from detgen.prompts import BadLine

_AHEAD = 256  # prompts that are scored at a time
# The one refusal that depends on the machine: another one has room for longer sequences.
_NO_ROOM = re.compile(r", the KV cache holds sequences of (\d{1,12}); give it more with --kv-memory$")

# Of the tokens of scores, by place: the error of differences of logits that the tolerance allows, and how far the token
# is from being as likely as the best one, or the next.
Errors = dict[Key, dict[int, tuple[float, float]]]


class ScoreDerivation:
    """Derives the lines of a folder of scores and compares them.

    Args:
        engine: scores the prompts again.
        folder: the output folder.
        name: what errors call the input.
        kept: finds samples in the store of a run that has not finished; None if it has.
        result: takes the findings.

    Attributes:
        totals: totals over the lines.
        whole: whether every line could be compared, so that the totals can be.
    """

    def __init__(self, engine: Engine, folder: Path, name: str, *, kept: Find | None, result: AuditResult) -> None:
        self.totals = Totals()
        self.whole = True
        self._kept, stopped = kept, kept is not None
        self._engine, self._name, self._stopped, self._result = engine, name, stopped, result
        self._lines = Lines(folder / "outputs.jsonl", stopped=stopped, result=result)

    def check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        """Check the lines of all prompts; yields after each of a score.

        Raises:
            CheckError: the engine has no room for a prompt that the run had room for.
        """
        source = iter(items)
        while some := list(islice(source, _AHEAD)):
            errors: Errors = {}
            requests = [item for item in some if isinstance(item, ScoreRequest) and self._written(item)]
            scored = self._score(requests, errors)
            for item in some:
                if isinstance(item, BadLine):
                    self._refusal(item.index, bad_line(item).encode())
                    continue
                assert isinstance(item, ScoreRequest)
                if item.index not in scored:
                    self._result.missing += item.samples
                    continue
                failed = False
                for score in scored[item.index]:
                    if score.refused or self._was_refused(item):
                        self._refused(item, score)
                        break
                    failed |= self._compare(self._placed(score), errors)
                    yield
                self.totals.errors += failed
        self._lines.rest()

    def _written(self, request: ScoreRequest) -> bool:
        """Whether the run may have come to a prompt; one that was not stopped has come to all."""
        if self._kept is None or self._lines.peek() is not None:
            return True
        return any(self._kept(request, sample) is not None for sample in request.wanted)

    def _score(self, requests: list[ScoreRequest], errors: Errors) -> dict[int, list[Score]]:
        """The scores of some requests, by index; `errors` gets what rounding explains, under another profile."""
        tolerance = self._result.tolerance if self._result.other_profile else 0.0

        def trace(seq: ScoredSequence, first: int, logits: torch.Tensor) -> None:
            tokens = torch.tensor(seq.scored[first : first + len(logits)], device=logits.device)
            best = logits.topk(2).values
            own = logits.gather(-1, tokens[:, None])[:, 0]
            apart = torch.where(own == best[:, 0], best[:, 0] - best[:, 1], best[:, 0] - own)
            error = 2 * tolerance * logits.masked_fill(~logits.isfinite(), 0).abs().amax(-1)
            found = errors.setdefault((seq.request.index, seq.sample), {})
            found.update(enumerate(zip(error.tolist(), apart.tolist(), strict=True), seq.first + first))

        found: dict[int, list[Score]] = {request.index: [] for request in requests}
        for scores in self._engine.score_stream(requests, trace if tolerance else None):
            for score in scores:
                found[score.request.index].append(score)
        for own in found.values():
            own.sort(key=lambda score: score.sample)
        return found

    def _placed(self, score: Score) -> Score:
        """A score as a run writes it, its error with the place in the input."""
        if score.error is None:
            return score
        return replace(score, error=f"{self._name}:{score.request.line}: {score.error}")

    def _refused(self, request: ScoreRequest, score: Score) -> None:
        """A prompt that this engine refuses; if only for want of memory, the run may have had more."""
        line, derived = self._lines.peek(), output_line(self._placed(score)).encode()
        if line is not None and line.key == (request.index, 0):
            own = _NO_ROOM.search(score.error or "")
            if own is not None and "error" not in line.fields:
                raise CheckError(
                    f"prompt {request.index} needs more positions than this engine's KV cache holds"
                    f" ({int(own[1]):,}); give the audit more with --kv-memory"
                )
            if self._was_refused(request):
                derived = line.raw
        self._refusal(request.index, derived)

    def _refusal(self, index: int, derived: bytes) -> None:
        """Compare the line of a prompt that cannot run."""
        line = self._take((index, 0))
        if line is None:
            self._result.missing += self._stopped
            return
        self.totals.prompts += 1
        self.totals.errors += 1
        self._note(line, derived)

    def _compare(self, score: Score, errors: Errors) -> bool:
        """Compare the line of a score; whether it ended with an error, by itself."""
        key = (score.request.index, score.sample)
        derived = output_of(score)
        line = self._take(key)
        if self._kept is not None:
            kept = self._kept(score.request, score.sample)
            if line is None and kept is None:
                self._result.missing += 1
                return False
            check_kept(kept, score, self._result)
        elif line is None:
            return False
        self._result.samples += 1
        self._result.tokens += len(score.token_ids)
        if line is None:
            return False
        self.totals.prompts += score.sample == 0
        self.totals.add(score)
        if line.raw != derived and _rounded(line, derived, errors.get(key, {})):
            self._result.add(line.where, "rounding explains the log-probabilities", "tie")
        else:
            self._note(line, derived)
        return score.error is not None

    def _was_refused(self, request: ScoreRequest) -> bool:
        """Whether the run refused a prompt for want of memory: what its line says must follow from its room."""
        line = self._lines.peek()
        if line is None or line.key != (request.index, 0):
            return False
        error = line.fields.get("error")
        found = _NO_ROOM.search(error) if isinstance(error, str) else None
        if found is None:
            return False
        try:
            smaller = self._engine.with_settings(kv_memory=int(found[1]) * self._engine.position_bytes)
            (score, *_) = smaller.score(request)
        except EngineError:
            return False
        return score.refused and output_line(self._placed(score)).encode() == line.raw

    def _take(self, key: Key) -> Line | None:
        """The output line of a sample; None if there is none, which is a finding unless the run was stopped."""
        line = self._lines.take(key)
        if line is None:
            following = self._lines.peek()
            if following is not None:
                what = f"is {in_words(following.key)}, but {in_words(key)} comes here"
                self._result.add(following.where, what, "line")
            elif not self._stopped:
                self._result.add("outputs.jsonl", f"ends before {in_words(key)}", "line")
            self.whole = self.whole and self._stopped and following is None
        return line

    def _note(self, line: Line, derived: bytes) -> None:
        for where, what in compare_line(line, derived):
            self._result.add(where, what, "line")


def _rounded(line: Line, derived: bytes, errors: dict[int, tuple[float, float]]) -> bool:
    """Whether a line differs from what is derived no more than rounding under another profile explains."""
    fields, wanted = line.fields, json.loads(derived)
    theirs, own = fields.get("logprobs"), wanted.get("logprobs")
    if not errors or not isinstance(theirs, list) or own is None or dump(fields).encode() + b"\n" != line.raw:
        return False
    others = {**fields, **{name: wanted[name] for name in ("logprob", "is_greedy", "logprobs")}}
    if list(others.items()) != list(wanted.items()) or len(theirs) != len(own):
        return False
    return all(_close(*pair, *errors[i]) for i, pair in enumerate(zip(theirs, own, strict=True))) and (
        fields["logprob"] == math.fsum(each["logprob"] for each in theirs)
        and fields["is_greedy"] is all(each["greedy"] for each in theirs)
    )


def _close(written: Any, wanted: dict[str, Any], error: float, apart: float) -> bool:
    """Whether rounding explains what a line says of a token."""
    if not isinstance(written, dict) or written.keys() != wanted.keys() or written["token"] != wanted["token"]:
        return False
    was, now = written["logprob"], wanted["logprob"]
    if type(was) is not float or type(now) is not float or not abs(was - now) <= error:
        return False
    return written["greedy"] is wanted["greedy"] or (type(written["greedy"]) is bool and apart <= error)
