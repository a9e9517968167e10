"""The lines of a run, derived again, beside those that are there: what texts and scores have in common.

Everything is derived by the engine and the functions that write lines, and compared byte for byte.

A stopped run has samples in its store, beside its lines.
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

AHEAD = 256  # samples that are read at a time
# The one refusal that depends on the machine: another one has room for longer sequences.
_NO_ROOM = re.compile(r", the KV cache holds sequences of (\d{1,12}); give it more with --kv-memory")
_Done = TypeVar("_Done", Completion, Score)


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


class Replay(ABC):
    """Derives the lines of a run and compares them.

    Args:
        engine: reads the tokens again.
        folder: the output folder.
        name: what errors call the input.
        log: name of the acceptance log; None if there is none.
        kept: the store of a run that has not finished; None of one that has.
        result: takes the findings.

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
        self._smaller: dict[int, Engine | None] = {}  # by room

    def check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        """Check the lines of all prompts; yields after each sample.

        Raises:
            CheckError: the engine has no room for a prompt that the run had room for.
        """
        yield from self._check(items)
        for file in self._files:
            file.rest()

    @abstractmethod
    def _check(self, items: Iterable[Request | BadLine]) -> Iterator[None]:
        """The same, for the lines of prompts alone."""

    @abstractmethod
    def _refusal(self, engine: Engine, request: Request) -> str | None:
        """Why an engine refuses a request; None if it does not."""

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
        """Why the run must have refused a prompt, given why this engine does; None if it must have run.

        Only for want of memory the two may differ; then the run's own room decides.

        Raises:
            CheckError: this engine has less room than the run had.
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
        """What became of a sample as a run writes it, an error with its place in the input."""
        if done.error is None:
            return done
        return replace(done, error=f"{self._name}:{done.request.line}: {done.error}")


def _room(error: object) -> int | None:
    """The room that an error speaks of."""
    found = _NO_ROOM.search(error) if isinstance(error, str) else None
    return int(found[1]) if found else None
