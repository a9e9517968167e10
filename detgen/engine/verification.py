"""The verdict on a window: which drafted tokens stand, what the verifier puts in their place, what is rolled back.

The scheme of LLM-42 (arXiv 2601.17768, section 3, "decode, verify, rollback"): drafted tokens are accepted up to the
first that differs from the canonical choice; that choice is committed too, or, if none differs, the bonus token.
The engine judges all windows of a pass at once (`judge`); the audit replays a log window by window (`verify`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from detgen.engine.request import Status, TokenRecord
from detgen.engine.sequence import Sequence


class Verdict(NamedTuple):
    """What a window commits: accepted tokens, and one of the verifier's own unless the sequence ended before it.

    Attributes:
        tokens: committed tokens, at least one.
        statuses: one a committed token.
        rolled_back: drafted tokens after the last committed one.
    """

    tokens: list[int]
    statuses: list[Status]
    rolled_back: list[int]

    @property
    def accepted(self) -> int:
        """Drafted tokens that stand."""
        return len(self.statuses) - (self.statuses[-1] != "accepted")


def verify(drafted: list[int], chosen: list[int], ends: Callable[[list[int]], bool]) -> Verdict:
    """Compare a draft with the canonical choices.

    Args:
        drafted: k drafted tokens.
        chosen: k + 1 canonical choices: the one in place of each drafted token, and the one after them all.
        ends: whether the sequence ends with the last of the tokens committed so far: called once for each, in order.

    Returns:
        The verdict; committing stops at a token that ends the sequence.
    """
    if not drafted:
        ends(chosen)
        return Verdict(chosen, ["plain"], [])
    tokens: list[int] = []
    statuses: list[Status] = []
    for i, token in enumerate(chosen):
        agrees = i < len(drafted) and drafted[i] == token
        tokens.append(token)
        statuses.append("accepted" if agrees else "corrected" if i < len(drafted) else "bonus")
        if ends(tokens) or not agrees:
            break
    return Verdict(tokens, statuses, drafted[len(tokens) :])


class Verdicts(NamedTuple):
    """What the windows of a pass commit, as arrays; see `Verdict`.

    Attributes:
        accepted: int64 [windows], drafted tokens that stand.
        committed: int64 [windows], tokens committed: those, and one of the verifier's own unless the sequence ended
            before it.
    """

    accepted: np.ndarray
    committed: np.ndarray


def judge(firsts: np.ndarray, drafted: np.ndarray, chosen: np.ndarray, ends: np.ndarray) -> Verdicts:
    """`verify` for all windows of a pass at once.

    Args:
        firsts: int64 [windows], the first row of each window, ascending.
        drafted: int64 [rows], the drafted token that follows each row; of a window's last row a number that is no
            token.
        chosen: int64 [rows], the canonical choice after each row.
        ends: bool [rows], whether the sequence ends with that choice.
    """
    rows = np.arange(len(chosen))
    wrong = np.where(drafted != chosen, rows, len(rows))
    end = np.where(ends, rows, len(rows))
    accepted = np.minimum.reduceat(wrong, firsts) - firsts
    committed = np.minimum(accepted, np.minimum.reduceat(end, firsts) - firsts) + 1
    return Verdicts(np.minimum(accepted, committed), committed)


def record(
    seq: Sequence,
    verdict: Verdict,
    drafted: list[int],
    drafter: str,
    logprobs: list[float],
    margins: list[float | None],
) -> None:
    """Append the verdict to the sequence's tokens and acceptance log.

    Args:
        seq: changed in place: tokens, records, rounds.
        verdict: what `verify` said.
        drafted: the draft it judged.
        drafter: who drafted.
        logprobs: of each committed token.
        margins: of each committed token; None where there was no other candidate.
    """
    first = seq.generated
    for i, (token, status) in enumerate(zip(verdict.tokens, verdict.statuses, strict=True)):
        seen = drafted[i] if i < len(drafted) else None
        seq.records.append(TokenRecord(first + i, seq.rounds, token, drafter, seen, status, logprobs[i], margins[i]))
    behind = first + len(verdict.tokens)
    for i, token in enumerate(verdict.rolled_back):
        seq.records.append(TokenRecord(behind + i, seq.rounds, None, drafter, token, "rolled_back", None, None))
    seq.tokens += verdict.tokens
    seq.rounds += 1
