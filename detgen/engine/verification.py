"""The verdict on a window: which draft tokens are accepted, what replaces a wrong one, what is rolled back.

The scheme of LLM-42 (arXiv 2601.17768, section 3, "decode, verify, rollback"): draft tokens are accepted up to the
first one that differs from the canonical choice; that choice is committed, too, or the bonus token if none differs. All
windows of a pass are judged at once, and so are those of a log in replay (`detgen/verify/replay/rounds.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from detgen.engine.pass_results import WantedRows
from detgen.engine.records import CODES, NONE
from detgen.kernels.logprobs import Judged


class Verdicts(NamedTuple):
    """What the windows of a pass commit: accepted tokens, then one of the verifier's own unless they end first.

    Attributes:
        accepted: int64 [windows], number of accepted draft tokens.
        committed: int64 [windows], number of committed tokens: accepted ones and the verifier's own.
    """

    accepted: np.ndarray
    committed: np.ndarray


def judge(firsts: np.ndarray, drafted: np.ndarray, chosen: np.ndarray, ends: np.ndarray) -> Verdicts:
    """Compare the drafts of windows with the canonical choices; nothing is committed after the end of a sequence.

    Args:
        firsts: int64 [windows], first row of each window, ascending.
        drafted: int64 [rows], draft token after each row; after a window's last row, a number that is not a token.
        chosen: int64 [rows], canonical choice after each row.
        ends: bool [rows], whether the sequence ends with that choice.
    """
    rows = np.arange(len(chosen))
    wrong = np.where(drafted != chosen, rows, len(rows))
    end = np.where(ends, rows, len(rows))
    accepted = np.minimum.reduceat(wrong, firsts) - firsts
    committed = np.minimum(accepted, np.minimum.reduceat(end, firsts) - firsts) + 1
    return Verdicts(np.minimum(accepted, committed), committed)


def log_columns(
    rows: WantedRows, chosen: np.ndarray, committed: np.ndarray, judged: Judged, verified: np.ndarray, *, chained: bool
) -> tuple[np.ndarray | slice, dict[str, np.ndarray]]:
    """Return the acceptance log's entries for the windows of a pass.

    Args:
        rows: rows whose logits were wanted.
        chosen: int64 [rows], canonical choice after each row.
        committed: int64 [windows], number of choices that are committed.
        judged: scores of the committed tokens by their rows.
        verified: bool [windows], whether the sequence is verified.
        chained: whether each row is of a pass of its own.

    Returns:
        The rows that have an entry, and the entries' columns for `Log.write`: token, drafted, status, logprob and
        margin.
    """
    kept = committed > 0
    entries: np.ndarray | slice = slice(None)  # all rows, if nothing was drafted and nothing is broken
    statuses = np.where(verified, CODES["plain"], CODES["unverified"])
    logprobs, margins, tokens = judged.chosen, judged.margins, chosen
    if not (rows.single and kept.all()):
        taken = rows.depth < committed[rows.owner]
        was_drafted = rows.drafted != NONE
        agrees = np.where(rows.drafted == chosen, CODES["accepted"], CODES["corrected"])
        others = np.where((rows.counts[rows.owner] > 1) & (not chained), CODES["bonus"], statuses[rows.owner])
        statuses = np.where(taken, np.where(was_drafted, agrees, others), CODES["rolled_back"])
        logprobs, margins = np.zeros(len(chosen), np.float32), np.full(len(chosen), np.inf)
        logprobs[taken], margins[taken] = judged.chosen, judged.margins
        tokens = np.where(taken, chosen, NONE)
        entries = taken | (was_drafted & kept[rows.owner])
    columns = {"token": tokens, "drafted": rows.drafted, "status": statuses, "logprob": logprobs, "margin": margins}
    return entries, {name: column[entries] for name, column in columns.items()}
