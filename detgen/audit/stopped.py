"""What the store of a stopped run has, beside its lines."""

from __future__ import annotations

from collections.abc import Callable

from detgen.audit.result import AuditResult
from detgen.audit.run_files import Key, Line, in_words, parse
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score
from detgen.outputs.lines import acceptance_lines, output_line
from detgen.outputs.store import STORE

Sample = Completion | Score
Find = Callable[[Request, int], Sample | None]  # a request's sample in the store of a stopped run, if it is there


def output_of(sample: Sample) -> bytes:
    """The output line of a sample."""
    return output_line(sample).encode()


def log_of(sample: Sample) -> bytes:
    """The acceptance log of a sample."""
    return acceptance_lines(sample).encode() if isinstance(sample, Completion) and sample.error is None else b""


def line_of(sample: Sample) -> Line | None:
    """The output line of a sample, as a file would have it."""
    raw = output_of(sample)
    fields = parse(raw)
    return Line(STORE, raw, fields, (fields["index"], fields["sample"])) if fields else None


def log_lines_of(sample: Sample, key: Key) -> list[Line]:
    """The acceptance log of a sample, as a file would have it."""
    return [Line(STORE, raw, parse(raw) or {}, key) for raw in log_of(sample).splitlines(keepends=True)]


def check_kept(kept: Sample | None, derived: Sample, result: AuditResult) -> None:
    """Compare what the store has of a sample with what it must be."""
    if kept is None or (output_of(kept), log_of(kept)) == (output_of(derived), log_of(derived)):
        return
    key = derived.request.index, derived.sample
    result.add(STORE, f"what it has of {in_words(key)} is not what the other files have, or its tokens give", "line")
