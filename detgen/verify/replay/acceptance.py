"""What the acceptance log of a sample must be, given its tokens and what was drafted.

The drafts are taken from the log itself, since no output depends on who drafted what; everything else follows from
them by the functions with which the engine writes a log.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections import Counter
from typing import Any

import numpy as np

from detgen.drafters.registry import DRAFTERS
from detgen.engine.request import TokenRecord
from detgen.engine.sequence import Sequence
from detgen.engine.verification import record, verify
from detgen.verify.replay.run_files import Line

_DRAFTERS = frozenset(name for name in DRAFTERS if name != "auto")  # "auto" drafts by the others

_SHOWN = reprlib.Repr()


class LogError(ValueError):
    """A log that no run can have written: file and line, and the reason."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


def replay(seq: Sequence, tokens: list[int], lines: list[Line], vocabulary: int) -> None:
    """Commit a sample's tokens round by round, as its log says they were drafted.

    Args:
        seq: before its first token; gets tokens, records and counts. Log-probabilities and margins are the log's own.
        tokens: the completion.
        lines: the sample's lines of `acceptance.jsonl`.
        vocabulary: entries of the logits.

    Raises:
        LogError: the log cannot be one of these tokens.
    """
    rounds = itertools.groupby(lines, lambda line: line.fields.get("round"))
    while seq.generated < len(tokens):
        own = list(next(rounds, ("", iter(())))[1])
        if not own:
            raise LogError("acceptance.jsonl", f"ends before token {seq.generated} of {_name(seq)}")
        if seq.deterministic:
            _verified(seq, tokens, own, vocabulary)
        else:
            _unverified(seq, tokens, own)
    for _, group in rounds:
        raise LogError(next(group).where, f"comes after the last token of {_name(seq)}")
    _count(seq)


def _count(seq: Sequence) -> None:
    """The counts of a sample's records, by drafter."""
    rounds = Counter({r.round: r.drafter for r in seq.records}.values())
    for name, own in rounds.items():
        seq.drafts[name].rounds = own
    for (name, status), number in Counter((r.drafter, r.status) for r in seq.records).items():
        setattr(seq.drafts[name], status, number)
    for stats in seq.drafts.values():
        stats.drafted = stats.accepted + stats.corrected + stats.rolled_back


def _verified(seq: Sequence, tokens: list[int], lines: list[Line], vocabulary: int) -> None:
    """One round of a verified sample."""
    first, done = lines[0], seq.generated
    name = first.fields.get("drafter")
    if not isinstance(name, str) or name not in _DRAFTERS:
        names = ", ".join(sorted(_DRAFTERS))
        raise LogError(first.where, f"drafter is {_SHOWN.repr(name)}, but must be one of {names}")
    if not done and name != "none":
        raise LogError(first.where, f"drafter is {name!r}, but nobody drafts the first token")
    drafted = [line.fields["drafted"] for line in lines if line.fields.get("drafted") is not None]
    most = max(seq.remaining - 1, 0) if name != "none" else 0
    if len(drafted) > most:
        raise LogError(first.where, f"{len(drafted):,} tokens are drafted, where {most:,} can be")
    if not all(type(token) is int and 0 <= token < vocabulary for token in drafted):
        raise LogError(first.where, "a drafted token is not in the vocabulary")
    known = tokens[done : done + len(drafted) + 1]
    verdict = verify(drafted, known, lambda committed: done + len(committed) == len(tokens))
    committed = lines[: len(verdict.tokens)]
    if len(committed) < len(verdict.tokens):
        raise LogError(lines[-1].where, "the round ends before its last token")
    record(seq, verdict, drafted, name, *_scores(committed))


def _unverified(seq: Sequence, tokens: list[int], lines: list[Line]) -> None:
    """One round of an unverified sample: one token."""
    (logprob,), (margin,) = _scores(lines[:1])
    if logprob is not None and float(np.float32(logprob)) != logprob:  # all that can be said without logits
        raise LogError(lines[0].where, f"logprob is {logprob!r}, which is no float32")
    token = tokens[seq.generated]
    seq.records.append(TokenRecord(seq.generated, seq.rounds, token, "none", None, "unverified", logprob, margin))
    seq.tokens.append(token)
    seq.rounds += 1
    if len(lines) > 1:
        raise LogError(lines[1].where, "a round of an unverified sample has one token")


def _scores(lines: list[Line]) -> tuple[list[Any], list[float | None]]:
    """Log-probabilities and margins as lines have them; null where they are not finite."""
    logprobs = [_score(line, "logprob", -math.inf, 0.0) for line in lines]
    return logprobs, [_score(line, "margin", 0.0, math.inf) for line in lines]


def _score(line: Line, name: str, low: float, high: float) -> float | None:
    value = line.fields.get(name, "nothing")
    if value is None or (type(value) is float and low <= value <= high and value - value == 0):
        return value
    raise LogError(line.where, f"{name} is {_SHOWN.repr(value)}, but must be null or a number from {low:g} to {high:g}")


def _name(seq: Sequence) -> str:
    return f"prompt {seq.request.index}, sample {seq.sample}"
