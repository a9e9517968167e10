"""What the store of a stopped run has, beside its lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.outputs.lines import acceptance_lines, output_line
from detgen.outputs.store import STORE
from detgen.verify.replay.result import AuditResult
from detgen.verify.replay.run_files import Key, Line, in_words, parse


class KeptLines(NamedTuple):
    """The lines that a run is to write of a sample in its store: of `outputs.jsonl` and `acceptance.jsonl`."""

    output: bytes
    acceptance: bytes

    def output_line(self, key: Key) -> Line:
        """The output line, as a file would have it."""
        return Line(STORE, self.output, parse(self.output) or {}, key)

    def log_lines(self, key: Key) -> list[Line]:
        """The acceptance log, as a file would have it."""
        return [Line(STORE, raw, parse(raw) or {}, key) for raw in self.acceptance.splitlines(keepends=True)]

    def check(self, key: Key, derived: tuple[bytes, bytes], result: AuditResult) -> None:
        """Compare them with what they must be."""
        if self != derived:
            what = f"what it has of {in_words(key)} is not what the other files have, or its tokens give"
            result.add(STORE, what, "line")


class Kept:
    """The store of a stopped run.

    Args:
        find: a request's sample in it, if it is there.
        pieces: of the target's tokenizer.
    """

    def __init__(self, find: Callable[[Request, int], Completion | Score | None], pieces: Pieces) -> None:
        self._find, self._pieces = find, pieces

    def lines(self, request: Request, sample: int) -> KeptLines | None:
        """The lines of a sample; None if the store does not have it."""
        found = self._find(request, sample)
        if found is None:
            return None
        logged = isinstance(found, Completion) and found.error is None
        log = acceptance_lines(found).encode() if isinstance(found, Completion) and logged else b""
        return KeptLines(output_line(found, self._pieces).encode(), log)
