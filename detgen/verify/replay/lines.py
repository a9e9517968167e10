"""Derive the lines of a run and compare them: what texts and scores have in common.

Lines are derived by the engine and the functions that write them, and compared byte for byte.

A stopped run also has samples in its store.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from detgen.engine import Engine
from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.errors import CheckError, EngineError
from detgen.outputs import Totals
from detgen.outputs.lines import acceptance_lines, output_line
from detgen.outputs.store import STORE
from detgen.prompts import BadLine
from detgen.verify.replay.comparing import Key, Line, Lines, compare_line, in_words, parse
from detgen.verify.replay.result import AuditResult

AHEAD = 256  # samples that are read together
# The only refusal that depends on the machine: another one may have room for longer sequences.
_NO_ROOM = re.compile(r", the KV cache holds sequences of (\d{1,12}); give it more with --kv-memory")
_Done = TypeVar("_Done", Completion, Score)


class KeptLines(NamedTuple):
    """The lines of `outputs.jsonl` and `acceptance.jsonl` for a sample in the store of a run."""

    output: bytes
    acceptance: bytes

    def output_line(self, key: Key) -> Line:
        """Return the output line as a file would have it."""
        return Line(STORE, self.output, parse(self.output) or {}, key)

    def log_lines(self, key: Key) -> list[Line]:
        """Return the acceptance log as a file would have it."""
        return [Line(STORE, raw, parse(raw) or {}, key) for raw in self.acceptance.splitlines(keepends=True)]

    def check(self, key: Key, derived: tuple[bytes, bytes], result: AuditResult) -> None:
        """Compare the lines with the derived ones."""
        if self != derived:
            what = f"what it has of {in_words(key)} is not what the other files have, or its tokens give"
            result.add(STORE, what, "line")


class Kept:
    """The store of a stopped run.

    Args:
        find: returns a request's sample from the store, or None.
        pieces: pieces of the target's tokenizer.
    """

    def __init__(self, find: Callable[[Request, int], Completion | Score | None], pieces: Pieces) -> None:
        self._find, self._pieces = find, pieces

    def lines(self, request: Request, sample: int) -> KeptLines | None:
        """Return the lines of a sample; None if it is not in the store."""
        found = self._find(request, sample)
        if found is None:
            return None
        logged = isinstance(found, Completion) and found.error is None
        log = acceptance_lines(found).encode() if isinstance(found, Completion) and logged else b""
        return KeptLines(output_line(found, self._pieces).encode(), log)


class Replay(ABC):
    """Derives the lines of a run and compares them.

    Args:
        engine: reads the tokens again.
        folder: the output folder.
        name: name of the input in errors.
        log: name of the acceptance log; None if there is none.
        kept: the store of a run that has not finished, otherwise None.
        result: receives the findings.

    Attributes:
        totals: totals over the lines of `outputs.jsonl`.
        whole: whether every line could be derived, so that the totals can be compared.
    """

    def __init__(
        self, engine: Engine, folder: Path, name: str, *, log: str | None, kept: Kept | None, result: AuditResult
    ) -> None:
        self.totals = Totals()
        self.whole = True
        self._engine, self._name, self._kept, self._result = engine, name, kept, result
        self._stopped = kept is not None
        self._pieces = engine.pieces
        files = ("outputs.jsonl",) if log is None else ("outputs.jsonl", log)
        self._files = [Lines(folder / file, stopped=self._stopped, result=result) for file in files]
        self._outputs = self._files[0]
        self._tolerance = result.tolerance if result.other_profile else 0.0
        self._ended = False
        self._smaller: dict[int, Engine | None] = {}  # by the KV cache's positions

    def check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        """Check the lines of all prompts; yield after each sample.

        Raises:
            CheckError: if the engine has no room for a prompt that the run had room for.
        """
        yield from self._check(items)
        for file in self._files:
            file.rest()

    @abstractmethod
    def _check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        """Do the same for the lines of prompts alone."""

    @abstractmethod
    def _refusal(self, engine: Engine, request: Request) -> str | None:
        """Return why an engine refuses a request; None if it does not."""

    def _take(self, key: Key) -> Line | None:
        """Take the output line of a sample; None, a finding unless the run was stopped, if there is none."""
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

    def _check_refusal(self, index: int, derived: str) -> None:
        """Check the line of a prompt that cannot run."""
        line = self._take((index, 0))
        if line is None:
            self._result.missing += self._stopped
            return
        self.totals.prompts += 1
        self.totals.errors += 1
        compare_line(line, derived.encode(), self._result)

    def _refused(self, request: Request, own: str | None) -> str | None:
        """Return why the run must have refused a prompt, given this engine's reason; None if it must have run.

        The two may differ only for lack of memory; then the run's own room decides.

        Raises:
            CheckError: if this engine has less room than the run had.
        """
        line, mine = self._outputs.peek(), _room(own)
        if line is None or line.key != (request.index, 0):
            return own
        said = _room(line.fields.get("error"))
        if mine is not None and ("error" not in line.fields or (said or 0) > mine):
            raise CheckError(
                f"prompt {request.index} needs more positions than this engine's KV cache holds"
                f" ({mine:,}); give the audit more with --kv-memory"
            )
        if said is None or said == mine:
            return own
        if said not in self._smaller:
            try:
                self._smaller[said] = self._engine.with_settings(kv_memory=said * self._engine.position_bytes)
            except EngineError:
                self._smaller[said] = None
        smaller = self._smaller[said]
        return own if smaller is None else self._refusal(smaller, request)

    def _placed(self, done: _Done) -> _Done:
        """Return a sample as a run writes it, with the place in the input before an error."""
        if done.error is None:
            return done
        return replace(done, error=f"{self._name}:{done.request.line}: {done.error}")


def _room(error: object) -> int | None:
    """Return the room that an error states."""
    found = _NO_ROOM.search(error) if isinstance(error, str) else None
    return int(found[1]) if found else None
