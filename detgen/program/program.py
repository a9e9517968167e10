"""A program: the steps of a pass, each checked when it is added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from detgen.program.experts import ExpertLinear, Sort
from detgen.program.operands import Buffer, Cache, Into, Step, Weight, is_array
from detgen.program.steps import Take


class StepError(ValueError):
    """A step does not fit into its program."""


class Program:
    """The steps of a pass, in order; they keep the arrays that they name alive.

    Args:
        given: buffers that hold something before the first step.

    Attributes:
        buffers: the number of each buffer.
        steps: the steps added so far.
    """

    def __init__(self, *given: Buffer) -> None:
        self.buffers: dict[Buffer, int] = {}
        self.steps: list[Step] = []
        self._wanted: dict[Buffer, bool] = dict.fromkeys(given, False)  # of what holds something: only wanted rows?
        self._filled = {buffer: buffer.width for buffer in given}  # of it, entries of a row, from the first on
        self._sorted: Sort | None = None
        for buffer in given:
            self.buffers.setdefault(buffer, len(self.buffers))

    def add(self, step: Step) -> None:
        """Append a step.

        Raises:
            StepError: if it does not fit; names the step and what is wrong.
        """
        for fault in self._faults(step):
            raise StepError(f"step {step.name!r} ({type(step).__name__}): {fault}")
        for buffer in (*step.reads, step.writes):
            self.buffers.setdefault(buffer, len(self.buffers))
        if isinstance(step, Sort):
            self._sorted = step
        elif self._sorted is not None and step.writes == self._sorted.routes:
            self._sorted = None
        self._wanted[step.writes] = step.wanted
        if not _adds(step):
            self._filled[step.writes] = step.columns[1]
        self.steps.append(step)

    def _faults(self, step: Step) -> Iterator[str]:
        yield from step.faults()
        wanted = step.wanted and not isinstance(step, Take)
        for buffer in step.reads:
            yield from self._unread(buffer, wanted)
        to, first = step.writes, step.columns[0]
        if _adds(step):
            yield from self._unread(to, wanted)
        elif first and (self._filled.get(to), self._wanted.get(to)) != (first, step.wanted):
            yield f"writes {to} from {first} on, which the steps before do not fill up to there"
        if isinstance(step, ExpertLinear):
            found = self._sorted
            if found is None or (found.routes, found.wanted) != (step.routes, step.wanted):
                yield f"the rows of {step.routes} are not sorted"
            elif found.experts != step.weight.data.shape[0]:
                yield f"weights of {step.weight.data.shape[0]} experts, not {found.experts}"

    def _unread(self, buffer: Buffer, wanted: bool) -> Iterator[str]:
        """Return why a step cannot read such rows of a buffer."""
        if buffer not in self._wanted:
            yield f"reads {buffer}, which no step has written"
        elif self._wanted[buffer] != wanted:
            yield f"reads {'the wanted' if wanted else 'all'} rows, but {buffer} has {'all' if wanted else 'others'}"
        elif self._filled[buffer] != buffer.width:
            yield f"reads {buffer}, of which only {self._filled[buffer]} entries of a row are written"

    def __str__(self) -> str:
        """One line for each step: its name, its kind, what it reads and writes, and its other fields."""
        rows = [(s.name, type(s).__name__, _flow(s), _rest(s)) for s in self.steps]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join("  ".join((*map(str.ljust, row[:3], widths), row[3])).rstrip() for row in rows)


def _adds(step: Step) -> bool:
    """Return whether results are added to a buffer."""
    to = getattr(step, "to", None)
    return isinstance(to, Into) and to.add


def _flow(step: Step) -> str:
    arrow = "+>" if _adds(step) else "->"
    return f"{', '.join(map(str, step.reads))} {arrow} {step.writes}{' wanted' if step.wanted else ''}".lstrip()


def _rest(step: Step) -> str:
    """Fields other than buffers that differ from their defaults."""
    found = []
    for f in fields(step):
        value = getattr(step, f.name)
        if f.name in ("name", "wanted") or isinstance(value, Buffer):
            continue
        if isinstance(value, Into):
            found += [f"factor={value.factor:g}"] * (value.factor != 1)
        elif isinstance(value, Weight):
            found.append(f"{value.inputs}x{value.outputs} {value.storage.name}{'' if value.bias is None else ' +bias'}")
        elif isinstance(value, Cache):
            found.append(f"heads={value.heads}/{value.kv_heads}x{value.size}")
        elif is_array(value) or f.default is MISSING or value != f.default:
            found.append(f"{f.name}={_plain(value)}")
    return ", ".join(found)


def _plain(value: Any) -> str:
    if is_array(value):
        return str(list(value.shape))
    return str(getattr(value, "name", f"{value:g}" if isinstance(value, float) else value))
