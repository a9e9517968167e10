"""Derive the acceptance log of a sample whose tokens are known, given its drafts.

The drafts are taken from the log itself, since no output depends on who drafted what; everything else follows from
them by the engine's own verdict on windows and its own log.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from typing import Any, NamedTuple

import numpy as np

from detgen.drafters.registry import DRAFTERS
from detgen.engine.pass_results import WantedRows
from detgen.engine.records import Log
from detgen.engine.sequence import Sequence
from detgen.engine.verification import judge, log_columns
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.logprobs import Judged
from detgen.verify.replay.comparing import Line

_DRAFTERS = frozenset(name for name in DRAFTERS if name != "auto")  # "auto" drafts by the others
_NO_TOKEN = -2  # follows the last token of a completion; neither a token nor `NONE`

_SHOWN = reprlib.Repr()


class LogError(ValueError):
    """No run can have written a log: the file and line, if known, and the reason."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where, self.what = where, what


class Rounds(NamedTuple):
    """The rounds of a sample, according to its log.

    Attributes:
        windows: one per round: the token before it, and its draft.
        drafters: who drafted each.
        lines: lines of the log, one for each token of the completion.
    """

    windows: list[Window]
    drafters: list[str]
    lines: list[Line]


def rounds_of(seq: Sequence, tokens: list[int], lines: list[Line], vocabulary: int) -> Rounds:
    """Divide a completion into the rounds of its log.

    Args:
        seq: the sequence before its first token.
        tokens: the completion.
        lines: the sample's lines of `acceptance.jsonl`, with the fields of their entries.
        vocabulary: entries of the logits.

    Raises:
        LogError: if the log cannot belong to these tokens.
    """
    found, name = Rounds([], [], []), f"prompt {seq.request.index}, sample {seq.sample}"
    text = [*seq.tokens, *tokens]
    groups = itertools.groupby(lines, lambda line: line.fields.get("round"))
    while (done := len(found.lines)) < len(tokens):
        own = list(next(groups, ("", iter(())))[1])
        if not own:
            raise LogError("", f"ends before token {done} of {name}")
        drafter, draft = _draft(seq, own, done, vocabulary) if seq.deterministic else ("none", [])
        at = len(seq.tokens) + done - 1
        window = Window(len(found.windows), at, [text[at], *draft], 1 + len(draft))
        count = int(_committed(WantedRows.of(Windows.of([window])), text)[0]) if draft else 1
        if len(own) < count:
            raise LogError(own[-1].where, "the round ends before its last token")
        found.windows.append(window)
        found.drafters.append(drafter)
        found.lines.extend(own[:count])
    for _, group in groups:
        raise LogError(next(group).where, f"comes after the last token of {name}")
    return found


def _draft(seq: Sequence, lines: list[Line], done: int, vocabulary: int) -> tuple[str, list[int]]:
    """Return the drafter and the draft of a verified sample's round after so many tokens."""
    first = lines[0]
    name = first.fields["drafter"]
    if not isinstance(name, str) or name not in _DRAFTERS:
        names = ", ".join(sorted(_DRAFTERS))
        raise LogError(first.where, f"drafter is {_SHOWN.repr(name)}, but must be one of {names}")
    if not done and name != "none":
        raise LogError(first.where, f"drafter is {name!r}, but the first token is never drafted")
    drafted = [line.fields["drafted"] for line in lines if line.fields["drafted"] is not None]
    most = max(seq.remaining - done - 1, 0) if name != "none" else 0
    if len(drafted) > most:
        raise LogError(first.where, f"{len(drafted):,} tokens are drafted, where {most:,} can be")
    if not all(type(token) is int and 0 <= token < vocabulary for token in drafted):
        raise LogError(first.where, "a drafted token is not in the vocabulary")
    return name, drafted


def _chosen(rows: WantedRows, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the token behind each row, int64 [rows], and its position in the sequence."""
    at = rows.positions[rows.owner] + rows.depth + 1
    return np.array([*text, _NO_TOKEN])[np.minimum(at, len(text))], at


def _committed(rows: WantedRows, text: list[int]) -> np.ndarray:
    """Return how many tokens each window commits, int64 [windows], if the text is what is chosen."""
    chosen, at = _chosen(rows, text)
    committed: np.ndarray = judge(rows.firsts, rows.drafted, chosen, at == len(text) - 1).committed
    return committed


def commit(seq: Sequence, tokens: list[int], rounds: Rounds, judged: Judged) -> None:
    """Commit a completion round by round.

    Args:
        seq: the sequence before its first token; receives tokens, records and counts.
        tokens: the completion.
        rounds: its rounds.
        judged: log-probability and margin of each token.
    """
    text = [*seq.tokens, *tokens]
    rows, log = WantedRows.of(Windows.of(rounds.windows)), Log()
    (chosen, at), committed = _chosen(rows, text), _committed(rows, text)
    verified = np.full(len(committed), seq.deterministic)
    entries, columns = log_columns(rows, chosen, committed, judged, verified, chained=False)
    owner = rows.owner[entries]
    log.write(
        owner=np.zeros(len(owner), np.int64),
        position=at[entries] - seq.prompt_length,
        round=owner,
        drafter=np.array([log.drafter(name) for name in rounds.drafters])[owner],
        **columns,
    )
    ((seq.records, seq.drafts),) = log.take([0])
    seq.tokens = text


def written_scores(rounds: Rounds) -> Judged:
    """Return what the log of an unverified sample says about its tokens, which cannot be derived.

    Raises:
        LogError: if no logits give these numbers.
    """
    logprobs = [_score(line, "logprob", -math.inf, 0.0) for line in rounds.lines]
    margins = [_score(line, "margin", 0.0, math.inf) for line in rounds.lines]
    return Judged(
        None,
        np.array([-math.inf if p is None else p for p in logprobs], np.float32),
        np.array([math.inf if m is None else m for m in margins]),
    )


def _score(line: Line, name: str, low: float, high: float) -> Any:
    value = line.fields[name]
    if value is None or (type(value) is float and low <= value <= high and value - value == 0):
        return value
    needed = f"a number from {low:g} to {high:g} or left out"
    raise LogError(line.where, f"{name} is {_SHOWN.repr(value)}, but must be {needed}")
