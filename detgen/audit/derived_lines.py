"""The lines of a run, derived again from its prompts and tokens, beside those that are there.

Everything of a line that its tokens, its log-probabilities and its drafts do not leave open is derived by the functions
that write it, and compared byte for byte. What the logits must give is left to `judging`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from detgen.audit.acceptance import LogError, replay
from detgen.audit.audited import Audited
from detgen.audit.line_differences import compare_line, compare_log, plausible, shown
from detgen.audit.result import AuditResult
from detgen.audit.run_files import Key, Line, Lines, in_words
from detgen.audit.stopped import Find, Sample, check_kept, line_of, log_lines_of, log_of, output_of
from detgen.audit.thoughts import Claims, claims_of, possible
from detgen.engine import Engine
from detgen.engine.request import Completion, Request, Thought, TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.errors import CheckError, RequestError
from detgen.outputs import Totals
from detgen.outputs.lines import bad_line, output_line
from detgen.prompts import BadLine

# The one refusal that depends on the machine: another one has room for longer sequences.
_NO_ROOM = re.compile(
    r"the prompt has (\d+) tokens and may grow to (\d+), the KV cache holds sequences of (\d+);"
    r" give it more with --kv-memory, or ask for fewer --max-tokens"
)


class Derivation:
    """Derives the lines of a run and compares them.

    Args:
        engine: knows how a request begins and ends, and generates those that end with an error.
        folder: the output folder.
        name: what errors call the input.
        kept: finds samples in the store of a run that has not finished; None if it has.
        result: takes the findings.

    Attributes:
        totals: totals over the samples of `outputs.jsonl`.
        whole: whether every line could be derived, so that the totals can be compared.
    """

    def __init__(self, engine: Engine, folder: Path, name: str, *, kept: Find | None, result: AuditResult) -> None:
        self.totals = Totals()
        self.whole = True
        stopped = kept is not None
        self._engine, self._name, self._stopped, self._result = engine, name, stopped, result
        self._kept = kept
        self._outputs = Lines(folder / "outputs.jsonl", stopped=stopped, result=result)
        self._acceptance = Lines(folder / "acceptance.jsonl", stopped=stopped, result=result)
        self._generated: tuple[Request, list[Completion]] | None = None
        self._ended = False
        self._failed = -1  # the last prompt of which a sample ended with an error
        self._broken: Key | None = None  # the last sample whose acceptance log no run can have written

    def check(self, items: Iterable[Request | BadLine]) -> Iterator[Audited]:
        """Check the lines of all prompts; the samples whose tokens can be judged.

        Raises:
            CheckError: the engine has no room for a prompt that the run had room for.
        """
        for item in items:
            refusal, sequences = self._sequences(item)
            if refusal is not None:
                self._check_refusal(item, refusal)
            for seq in sequences:
                audited = self._check_sample(seq)
                if audited is not None:
                    yield audited
                if self._ended:
                    break
            if self._ended:
                break
        self._outputs.rest()
        self._acceptance.rest()

    def _sequences(self, item: Request | BadLine) -> tuple[str | None, Iterable[Sequence]]:
        """The line of a prompt that cannot run, or else its samples before their first token."""
        if isinstance(item, BadLine):
            return bad_line(item), ()
        try:
            sequences = self._engine.sequences(item)
        except RequestError as error:
            return self._refused_with(item, error), ()
        line = self._outputs.peek()
        if line is None or line.key != (item.index, 0) or "error" not in line.fields:
            return None, sequences
        first = next(sequences)
        sequences = chain([first], sequences)
        room = self._room(line)
        if room is None or room[:2] != (first.prompt_length, first.limit) or not room[2] < first.limit:
            return None, sequences
        text = str(line.fields["error"])
        return self._error_line(item, text[text.rfind("the prompt has ") :]), ()

    def _refused_with(self, item: Request, error: RequestError) -> str:
        """The line of a prompt that this engine refuses; if only for want of memory, the run's room counts."""
        line, own = self._outputs.peek(), _NO_ROOM.fullmatch(str(error))
        if own and line is not None and line.key == (item.index, 0):
            room = self._room(line)
            if "error" not in line.fields:
                raise CheckError(
                    f"prompt {item.index} needs {int(own[2]):,} positions, this engine's KV cache holds sequences of"
                    f" {int(own[3]):,}; give the audit more with --kv-memory"
                )
            if room and room[:2] == (int(own[1]), int(own[2])) and room[2] < room[1]:
                text = str(line.fields["error"])
                return self._error_line(item, text[text.rfind("the prompt has ") :])
        return self._error_line(item, str(error))

    def _room(self, line: Line) -> tuple[int, ...] | None:
        """Tokens, positions and room in an error that depends on the run's memory; its other figures do not."""
        error = line.fields.get("error")
        found = _NO_ROOM.search(error) if isinstance(error, str) else None
        return tuple(int(figure) for figure in found.groups()) if found else None

    def _error_line(self, request: Request, error: str) -> str:
        return output_line(Completion(request, error=self._placed(request, error)))

    def _placed(self, request: Request, error: str) -> str:
        """An error as a run writes it, with its place in the input."""
        return f"{self._name}:{request.line}: {error}"

    def _check_refusal(self, item: Request | BadLine, refusal: str) -> None:
        """Check the line of a prompt that cannot run."""
        key = (item.index, 0)
        line = self._take(key)
        if line is None:
            self._result.missing += self._stopped
            return
        self.totals.prompts += 1
        self.totals.errors += 1
        if "error" not in line.fields or line.fields["error"] != json.loads(refusal)["error"]:
            self._result.add(line.where, f"should be the error {json.loads(refusal)['error']!r}", "line")
        else:
            self._note(compare_line(line, refusal.encode()))
        self._unexpected(self._acceptance.take_all(key))

    def _take(self, key: Key) -> Line | None:
        """The output line of a sample; None if there is none, which is a finding unless the run was stopped."""
        line = self._outputs.take(key)
        if line is None:
            following = self._outputs.peek()
            if following is not None:
                what = f"is {in_words(following.key)}, but {in_words(key)} comes here"
                self._result.add(following.where, what, "line")
            elif not self._stopped:
                self._result.add("outputs.jsonl", f"ends before {in_words(key)}", "line")
                self._ended = True
            self.whole = self.whole and self._stopped and following is None
        return line

    def _check_sample(self, seq: Sequence) -> Audited | None:
        """Check the lines of a sample that can run; None if its tokens cannot be judged."""
        key = (seq.request.index, seq.sample)
        written = self._take(key)
        kept = self._kept(seq.request, seq.sample) if self._kept is not None else None
        lines = self._log(key, kept)
        line = written or (line_of(kept) if kept is not None else None)
        if line is None:
            self._result.missing += self._stopped
            if lines is not None:
                self._unexpected(lines)
            return None
        if written is not None and seq.sample == 0:
            self.totals.prompts += 1
        derived, audited = self._error(seq, line, lines) if "error" in line.fields else self._text(seq, line, lines)
        if derived is not None:
            self._note(compare_line(line, output_of(derived)))
        if derived is None or lines is None or self._broken == key:
            self.whole = False
            return audited
        self._note(compare_log(lines, log_of(derived)))
        if written is not None:
            self.totals.add(derived)
            if "error" in line.fields and self._failed != seq.request.index:
                self._failed = seq.request.index
                self.totals.errors += 1
        check_kept(kept, derived, self._result)
        return audited

    def _log(self, key: Key, kept: Sample | None) -> list[Line] | None:
        """The acceptance log of a sample; the store's where a stopped run's file ends, None if nobody has it."""
        lines = self._acceptance.take_all(key)
        if not self._stopped or self._acceptance.peek() is not None:
            return lines
        if kept is None:
            return None  # whether it is complete, nobody can tell
        found = b"".join(line.raw for line in lines)
        if found != log_of(kept):
            if not log_of(kept).startswith(found + self._acceptance.torn):
                self._result.add("acceptance.jsonl", f"{in_words(key)} is not what the store has", "line")
            self._acceptance.torn = b""
        return log_lines_of(kept, key)

    def _error(self, seq: Sequence, line: Line, lines: list[Line] | None) -> tuple[Completion | None, None]:
        """A sample that ended with an error: only generating it again shows whether it must."""
        request = seq.request
        if self._generated is None or self._generated[0] is not request:
            self._generated = request, self._engine.generate([request])
        own = next((c for c in self._generated[1] if c.sample == seq.sample), None)
        if own is None or own.error is None:
            self._result.add(line.where, f"is an error, but the prompt can run: {shown(line.fields['error'])}", "line")
            return None, None
        return replace(own, error=self._placed(request, own.error)), None

    def _text(self, seq: Sequence, line: Line, lines: list[Line] | None) -> tuple[Completion | None, Audited | None]:
        """A sample as its tokens give it, and the sample for the judge; None where there is no telling."""
        tokens = line.fields.get("token_ids")
        known = range(self._engine.vocabulary)
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int and t in known for t in tokens):
            self._result.add(line.where, "has no tokens, or tokens that are not in the vocabulary", "line")
            return None, None
        if len(tokens) > seq.remaining:
            self._result.add(line.where, f"has {len(tokens):,} tokens, but may have {seq.remaining:,} at most", "line")
            return None, None
        logprobs = self._logprobs(line, seq, tokens)
        thoughts = self._thoughts(line, seq, tokens)
        prompt = list(seq.tokens)
        early = self._ends_early(seq, tokens)
        seq.finish_reason = None
        if not early:
            self._engine.stopping.ends(seq, tokens)
        reason = seq.finish_reason
        replayed = lines is not None and self._replay(seq, tokens, lines)
        seq.tokens[:] = prompt + tokens
        derived = Completion(
            request=seq.request,
            sample=seq.sample,
            text=self._engine.stopping.text(seq),
            token_ids=tuple(tokens),
            finish_reason=reason,
            prompt_tokens=seq.prompt_length,
            logprobs=tuple(logprobs) if logprobs is not None else None,
            records=tuple(seq.records),
            drafts=seq.drafts,
            thoughts=None if thoughts is None else tuple(Thought(first, (), text) for first, text in thoughts),
        )
        seq.tokens[:] = prompt
        scores = [(r.logprob, r.margin) for r in seq.records if r.token is not None] if replayed else None
        if not seq.deterministic:
            self._result.unverified += 1
            self._check_unverified(line, seq, tokens, logprobs, scores)
            return derived, None
        self._result.samples += 1
        self._result.tokens += len(tokens)
        tolerance = self._result.tolerance if self._result.other_profile else 0.0
        return derived, Audited(seq, tokens, line.where, logprobs, tolerance, scores, thoughts)

    def _replay(self, seq: Sequence, tokens: list[int], lines: list[Line]) -> bool:
        """Derive the acceptance log of a sample from its drafts; whether that is possible."""
        try:
            replay(seq, tokens, lines, self._engine.vocabulary)
        except LogError as error:
            self._result.add(error.where, error.what, "line")
            self._broken = (seq.request.index, seq.sample)
            return False
        return True

    def _logprobs(self, line: Line, seq: Sequence, tokens: list[int]) -> list[TokenLogprobs] | None:
        """The log-probabilities of a line; None if there are none, which is a finding if the request wants them."""
        wanted = seq.request.params.logprobs
        entries: Any = line.fields.get("logprobs")
        if wanted is None and entries is None:
            return None
        try:
            if wanted is None or [e["token"] for e in entries] != tokens:
                raise ValueError
            return [
                TokenLogprobs(_number(e["logprob"]), tuple((int(t), _number(p)) for t, p in e["top"])) for e in entries
            ]
        except (ValueError, TypeError, KeyError, OverflowError):
            self._result.add(line.where, "does not have logprobs for each token", "line")
            return None

    def _thoughts(self, line: Line, seq: Sequence, tokens: list[int]) -> Claims | None:
        """The thoughts of a line; None if there are none, which is a finding if the model thinks."""
        thinking = self._engine.thinking
        if thinking is None:
            return None
        claims = claims_of(line.fields.get("thoughts"))
        read = len(seq.tokens) + len(tokens) - 1
        if claims is None or not (seq.deterministic or possible(claims, thinking.chunk, read)):  # else they are judged
            self._result.add(line.where, "does not have the thoughts of its chunks, in order", "line")
        return claims

    def _ends_early(self, seq: Sequence, tokens: list[int]) -> bool:
        """Whether the sequence ends before its last token; only stop strings need trying token by token."""
        stopping = self._engine.stopping
        params = seq.request.params
        if params.stop:
            return any(stopping.ends(seq, tokens[:count]) for count in range(1, len(tokens)))
        return not seq.ending.isdisjoint(tokens[params.min_tokens : -1])

    def _check_unverified(
        self,
        line: Line,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        scores: list[tuple[float | None, float | None]] | None,
    ) -> None:
        """Log-probabilities that no canonical pass can judge: whether they go together."""
        for i, (token, entry) in enumerate(zip(tokens, logprobs or (), strict=False)):
            wanted = min(seq.request.params.logprobs or 0, self._engine.vocabulary)
            choice = seq.choice(i, tokens)
            greedy = choice.temperature == 0 and choice.adjustment is None
            if not plausible(entry, token, wanted, greedy, self._engine.vocabulary):
                self._result.add(line.where, f"token {i}: no logits give these log-probabilities", "line")
            elif scores is not None and (scores[i][0] if scores[i][0] is not None else -math.inf) != entry.logprob:
                self._result.add(line.where, f"token {i}: the logprob is not that of acceptance.jsonl", "line")

    def _unexpected(self, lines: list[Line]) -> None:
        """Lines of the acceptance log where there can be none."""
        self._note((line.where, f"is of {in_words(line.key)}, which has no tokens") for line in lines)

    def _note(self, found: Iterable[tuple[str, str]]) -> None:
        for where, what in found:
            self._result.add(where, what, "line")


def _number(value: float | None) -> float:
    """A log-probability as a line spells it: null is minus infinity."""
    return -math.inf if value is None else float(value)
