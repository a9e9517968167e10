"""Derive the lines of a run's texts from its prompts and tokens.

The tokens and who drafted what are taken from the run. The rest is derived by canonical passes, by the engine's own
rules for the end of a text, and by the functions that write lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from detgen.engine import Engine
from detgen.engine.answering import completion_of
from detgen.engine.request import Completion, Request, TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.outputs.lines import acceptance_lines, bad_line, output_line
from detgen.outputs.records import log_entry
from detgen.prompts import BadLine
from detgen.verify.replay.comparing import Allow, Line, Place, compare_line, compare_log, in_words, plausible, shown
from detgen.verify.replay.lines import AHEAD, KeptLines, Replay
from detgen.verify.replay.reading import Known, read, refusal
from detgen.verify.replay.rounds import LogError, Rounds, commit, rounds_of, written_scores


@dataclass(slots=True)
class _Sample(Known):
    """A sample and its lines.

    Attributes:
        line: its line of `outputs.jsonl`, or of the store where a stopped run's file ends.
        log: its lines of `acceptance.jsonl`; None if there are none, or no run can have written them.
        written: whether `outputs.jsonl` has the line.
        kept: its lines in the store of a stopped run.
    """

    line: Line = field(kw_only=True)
    log: list[Line] | None = field(kw_only=True)
    written: bool = field(kw_only=True)
    kept: KeptLines | None = field(kw_only=True)

    def allow(self, tolerance: float) -> Allow:
        """Return a judge that allows any values beside a wrong token, and those that rounding explains."""

        def allow(path: Place, found: Any, wanted: Any, line: dict[str, Any]) -> str | None:
            in_log = path in (("logprob",), ("margin",)) and line.get("token") is not None
            if not (isinstance(found, float | None) if in_log else path[0] == "logprobs" and len(path) > 1):
                return None
            place = line["position"] if in_log else path[1]
            if place in self.mismatches:
                return "free"
            if not tolerance:
                return None
            error = 2 * self.errors[place]
            if path == ("margin",):  # a difference of logits / temperature; a filter may have dropped the runner-up
                choice = self.choice(place)
                stretch = choice.adjustment.stretch if choice.adjustment is not None else 1.0
                error = math.inf if choice.filtered else error * stretch / (choice.temperature or 1.0)
            apart = _distance(found, wanted) if in_log else _apart(found, wanted)
            return "tie" if apart <= error else None

        return allow


class TextReplay(Replay):
    """Derives the lines of texts; see `Replay`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._log_name: str | None = named["log"]
        self._acceptance = self._files[1] if self._log_name is not None else None
        self._generated: tuple[Request, list[Completion]] | None = None
        self._failed = -1  # the last prompt with a sample that ended with an error

    def _check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        samples = self._samples(items)
        while some := list(islice(samples, AHEAD)):
            verified = [sample for sample in some if sample.sequence.deterministic]
            for sample in some:
                if not sample.sequence.deterministic:
                    self._check_unverified(sample)
            for sample in read(self._engine, verified, self._tolerance):
                self._check_verified(sample)
                yield

    def _refusal(self, engine: Engine, request: Request) -> str | None:
        return refusal(engine, request)

    def _samples(self, items: Iterable[Request | BadLine]) -> Iterator[_Sample]:
        """Yield the samples whose tokens can be judged; the lines of all others are checked at once."""
        for item in items:
            if isinstance(item, BadLine):
                self._check_refusal(item.index, bad_line(item))
            elif (why := self._refused(item, self._refusal(self._engine, item))) is not None:
                self._check_refusal(item.index, output_line(self._placed(Completion(item, error=why)), self._pieces))
            else:
                for seq in self._engine.sequences(item):
                    if (sample := self._sample(seq)) is not None:
                        yield sample
                    if self._ended:
                        return
            if self._ended:
                return

    def _sample(self, seq: Sequence) -> _Sample | None:
        """Return a sample that can run; None if its tokens cannot be judged."""
        key = (seq.request.index, seq.sample)
        written = self._take(key)
        kept = self._kept.lines(seq.request, seq.sample) if self._kept is not None else None
        log = self._log(seq, kept)
        line = written or (kept.output_line(key) if kept is not None else None)
        if line is None:
            self._result.missing += self._stopped
            for each in log or ():
                self._result.add(each.where, f"is of {in_words(key)}, which has no tokens", "line")
            return None
        self.totals.prompts += written is not None and seq.sample == 0
        tokens: Any = line.fields.get("token_ids")
        sample = _Sample(seq, tokens, line=line, log=log, written=written is not None, kept=kept)
        known = range(self._engine.vocabulary)
        if "error" in line.fields:
            self._check_error(sample)
        elif not isinstance(tokens, list) or not tokens or not all(type(t) is int and t in known for t in tokens):
            self._give_up(sample, "has no tokens, or tokens that are not in the vocabulary")
        elif len(tokens) > seq.remaining:
            self._give_up(sample, f"has {len(tokens):,} tokens, but may have {seq.remaining:,} at most")
        else:
            return sample
        return None

    def _log(self, seq: Sequence, kept: KeptLines | None) -> list[Line] | None:
        """Return a sample's acceptance log, from the store where a stopped run's file ends; None if there is none."""
        key = (seq.request.index, seq.sample)
        if self._acceptance is None:
            return None if kept is None else _entries(kept.log_lines(key))
        lines = self._acceptance.take_all(key)
        if not self._stopped or self._acceptance.peek() is not None:
            return _entries(lines)
        if kept is None:
            return None  # it may be incomplete
        found = b"".join(line.raw for line in lines)
        if found != kept.acceptance:
            if not kept.acceptance.startswith(found + self._acceptance.torn):
                self._result.add(f"{self._log_name}", f"{in_words(key)} is not what the store has", "line")
            self._acceptance.torn = b""
        return _entries(kept.log_lines(key))

    def _give_up(self, sample: _Sample, what: str) -> None:
        """Record why the lines of a sample cannot be derived."""
        self._result.add(sample.line.where, what, "line")
        self.whole = False

    def _check_error(self, sample: _Sample) -> None:
        """Check the lines of a sample that ended with an error: only generating it again shows whether it must."""
        request = sample.sequence.request
        if self._generated is None or self._generated[0] is not request:
            self._generated = request, self._engine.generate([request])
        own = next((c for c in self._generated[1] if c.sample == sample.sequence.sample), None)
        if own is None or own.error is None:
            self._give_up(sample, f"is an error, but the prompt can run: {shown(sample.line.fields['error'])}")
            return
        self._compare(sample, self._placed(own))
        if sample.written and self._failed != request.index:
            self._failed = request.index
            self.totals.errors += 1

    def _check_verified(self, sample: _Sample) -> None:
        """Check the lines of a sample that was read by canonical passes."""
        self._result.samples += 1
        self._result.tokens += len(sample.tokens)
        if sample.error is not None:
            self._give_up(sample, f"is a text, but should have ended with an error: {sample.error}")
            return
        decode = self._engine.tokenizer.decode
        for place, m in sample.mismatches.items():
            token, expected = (f"{t} {decode([t])!r}" for t in (sample.tokens[place], m.expected))
            margin = "a filter drops it" if math.isinf(m.margin) else f"margin {m.margin:.3g}"
            what = f"token {place} is {token}, the logits give {expected} ({margin})"
            self._result.add(sample.line.where, what, "tie" if m.tie else "differs")
        sample.sequence.logprobs = sample.tops
        self._derive(sample, lambda _: sample.judged, sample.allow(self._tolerance))

    def _check_unverified(self, sample: _Sample) -> None:
        """Check what follows from the tokens of a sample for which nothing is promised.

        Its thoughts, log-probabilities and margins are taken from its lines if they are possible.
        """
        seq, line, vocabulary = sample.sequence, sample.line, self._engine.vocabulary
        self._result.unverified += 1
        if (wanted := seq.request.params.logprobs) is not None:
            try:
                seq.logprobs = _logprobs(line.fields.get("logprobs"), sample.tokens)
            except (ValueError, TypeError, KeyError, OverflowError):
                self._give_up(sample, "does not have logprobs for each token")
                return

        for i, token in enumerate(sample.tokens):
            adjustment = sample.choice(i).adjustment
            if adjustment is not None and adjustment.mask is not None and not adjustment.mask.allows(token):
                self._give_up(sample, f"token {i} does not fit the form of the text")
                return
        possible = []
        for i, (token, entry) in enumerate(zip(sample.tokens, seq.logprobs, strict=False)):
            choice = sample.choice(i)
            greedy = choice.temperature == 0 and choice.adjustment is None
            possible.append(plausible(entry, token, min(wanted or 0, vocabulary), greedy, vocabulary))
            if not possible[-1]:
                self._result.add(line.where, f"token {i}: no logits give these log-probabilities", "line")

        def judged(rounds: Rounds) -> Any:
            found = written_scores(rounds)
            for i, entry in enumerate(seq.logprobs):
                if possible[i] and np.float32(entry.logprob) != found.chosen[i]:
                    what = f"token {i}: the logprob is not that of {self._log_name}"
                    self._result.add(line.where, what, "line")
            return found

        def allow(path: Place, found: Any, wanted: Any, line: dict[str, Any]) -> str | None:
            thinking = self._engine.thinking
            assert thinking is not None or path[0] != "thoughts"
            if path[0] != "thoughts" or thinking is None:
                return None
            return "free" if _possible(found, thinking.chunk, len(seq.tokens) - 1) else None

        self._derive(sample, judged, allow)

    def _derive(self, sample: _Sample, judged: Callable[[Rounds], Any], allow: Allow) -> None:
        """Derive the lines of a text and compare them."""
        seq, stopping, tokens = sample.sequence, self._engine.stopping, sample.tokens
        ends = next((n for n in range(1, len(tokens) + 1) if stopping.ends(seq, tokens[:n])), None)
        if ends is not None and ends < len(tokens):
            what = f"has {len(tokens):,} tokens, but ends with token {ends - 1}"
            self._result.add(sample.line.where, what, "line")
            seq.finish_reason = None
        try:
            if sample.log is not None:
                rounds = rounds_of(seq, tokens, sample.log, self._engine.vocabulary)
                commit(seq, tokens, rounds, judged(rounds))
        except LogError as error:
            self._result.add(error.where or f"{self._log_name}", error.what, "line")
            sample.log = None
        if sample.log is None:
            seq.tokens = [*seq.tokens, *tokens]
        seq.text, seq.stop_reason = stopping.text(seq), stopping.reason(seq)
        thinking = self._engine.thinking
        completion = completion_of(
            seq, None if thinking is None else thinking.chunk, stopping.decode, self._engine.answering
        )
        self._compare(sample, completion, allow)

    def _compare(self, sample: _Sample, completion: Completion, allow: Allow = lambda *_: None) -> None:
        """Compare the lines of a sample with those of a completion, and count it."""
        derived = output_line(completion, self._pieces).encode()
        output = compare_line(sample.line, derived, self._result, allow)
        if sample.log is None:
            self.whole = self.whole and self._acceptance is None
            if sample.written and self._acceptance is None:
                self.totals.add(completion)
            return
        log = acceptance_lines(completion).encode() if completion.error is None else b""
        acceptance = compare_log(sample.log, log, self._result, allow)
        if sample.written:
            self.totals.add(completion)
        if sample.kept is not None:
            sample.kept.check(sample.line.key, (output, acceptance), self._result)


def _entries(lines: list[Line]) -> list[Line]:
    """Return lines of the acceptance log with the fields of their entries."""
    return [line._replace(fields=log_entry(line.fields)) for line in lines]


def _logprobs(entries: Any, tokens: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of a line.

    Raises:
        Exception: if it does not have them for each token.
    """
    if [e["token"] for e in entries] != tokens:
        raise ValueError
    return [TokenLogprobs(_number(e["logprob"]), tuple((int(t), _number(p)) for t, p, _ in e["top"])) for e in entries]


def _number(value: float | None) -> float:
    """Return a log-probability that a line spells; null is minus infinity."""
    return -math.inf if value is None else float(value)


def _distance(a: object, b: object) -> float:
    """Return the distance of two numbers of a line; infinite if one is missing."""
    return abs(a - b) if isinstance(a, float) and isinstance(b, float) else math.inf


def _apart(found: Any, wanted: Any) -> float:
    """Return the largest difference of a token's log-probabilities at the same rank."""
    try:
        ours, theirs = (_logprobs([entry], [wanted["token"]])[0] for entry in (wanted, found))
        tops = [abs(p - q) for (_, p), (_, q) in zip(ours.top, theirs.top, strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError):
        return math.inf
    return max([abs(ours.logprob - theirs.logprob), *tops])


def _possible(thoughts: object, chunk: int, read: int) -> bool:
    """Return whether these can be thoughts of full chunks among so many tokens, each once and in order."""
    firsts = []
    for entry in thoughts if isinstance(thoughts, list) else [None]:
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str)):
            return False
        firsts.append(entry[0])
    return firsts == sorted(set(firsts)) and all(f % chunk == 0 and 0 <= f <= read - chunk for f in firsts)
