"""Runs a program with kernels in Triton: one function per kind of step, with the bits of the compiled library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from detgen.errors import EngineError
from detgen.kernels.triton import attend, linear, norms, peaks, rowwise, state_kernels, whole_linear
from detgen.kernels.triton.launching import on
from detgen.program import steps
from detgen.program.arrays import Array, each, tensor
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import PANEL, Buffer, Into, Step
from detgen.program.program import Program
from detgen.program.rows import Rows, Take
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace, Watch
from detgen.program.storage import FORMATS
from detgen.program.widening import widened


@dataclass(slots=True)
class _Pass:
    """The state of a pass.

    Attributes:
        rows: its rows.
        buffers: float32 [rows, width] each; some hold only the wanted rows, and some have held both.
        broken: int8 [rows], 1 where a key of the last layer, or a watched entry, is not finite.
        count: rows of the current step.
    """

    rows: Rows
    buffers: dict[Buffer, torch.Tensor]
    broken: torch.Tensor
    count: int = 0

    def __getitem__(self, buffer: Buffer) -> torch.Tensor:
        """Return the rows of a buffer that a step reads or writes."""
        return self.buffers[buffer][: self.count]

    @property
    def spans(self) -> torch.Tensor:
        """The spans of the rows; see `Rows`."""
        found: torch.Tensor | None = self.rows.spans
        assert found is not None, "layers that keep states are told of the spans of a pass"
        return found


def _embed(s: steps.Embed, of: _Pass) -> None:
    rowwise.embed(s.table, of.rows.ids, 0, s.to, of[s.to.buffer], known=s.known)


def _embed_column(s: steps.EmbedColumn, of: _Pass) -> None:
    if s.weight.storage.whole:
        whole_linear.embed_column(s.weight, of.rows.ids, s.to, of[s.to.buffer])
    else:
        together = FORMATS[s.weight.storage].together
        rowwise.embed(s.weight.data, of.rows.ids, 0, s.to, of[s.to.buffer], PANEL, together)


def _embed_positions(s: steps.EmbedPositions, of: _Pass) -> None:
    rowwise.embed(s.table, of.rows.positions, s.offset, s.to, of[s.to.buffer])


def _norm(s: steps.Norm, of: _Pass) -> None:
    norms.norm(s, of[s.x], of[s.to.buffer])


def _linear(s: steps.Linear, of: _Pass) -> None:
    how: dict[str, Any] = {"activation": s.activation, "gated": s.gated, "softcap": s.softcap}
    into, to = s.to, of[s.to.buffer][:, slice(*s.columns)]
    linear.linear(of[s.x], s.weight, to, **how, add=into.add, factor=into.factor)


def _head_linear(s: steps.HeadLinear, of: _Pass) -> None:
    to, apart = of[s.to], s.passed + s.weight.outputs
    parts, made = (x.unflatten(1, (s.heads, -1)) for x in (of[s.x], to[:, : s.columns[1]]))
    made[..., : s.passed] = parts[..., : s.passed]
    x = parts[..., s.passed :].flatten(1)  # a copy, unless nothing is passed on
    linear.linear(x, s.weight, to[:, s.passed :], heads=s.heads, apart=apart)


def _scored_linear(s: steps.ScoredLinear, of: _Pass) -> None:
    x = of[s.x]
    logits = x.new_empty(len(x), s.weight.outputs)
    linear.linear(x, s.weight, logits, softcap=s.softcap, factor=s.factor)
    peaks.of_blocks(logits, of[s.to])


def _score(s: steps.Score, of: _Pass) -> None:
    peaks.of_rows(of[s.x], of[s.to])


def _rotate(s: steps.Rotate, of: _Pass) -> None:
    rowwise.rotate(s, of[s.qkv], of.rows.positions, of.rows.places, of.broken)


def _attend(s: steps.Attend, of: _Pass) -> None:
    attend.attend(s, of[s.qkv], of.rows.pieces, of.rows.tables, of[s.to])


def _copy(s: steps.Copy, of: _Pass) -> None:
    x, to = of[s.x], of[s.to.buffer]
    if x.shape[1] > s.size:
        x = x[:, s.at : s.at + s.size]
    gates = None if s.factors is None else s.factors.expand(len(x), -1)
    rowwise.copy(x, s.to, to[:, slice(*s.columns)], gates=gates, bound=s.bound)


def _take(s: steps.Take, of: _Pass) -> None:
    rowwise.copy(of.buffers[s.x], Into(s.to), of[s.to], take=of.rows.wanted)


def _gate(s: steps.Gate, of: _Pass) -> None:
    x = of[s.x][:, s.at : s.at + s.to.buffer.width]
    rowwise.copy(x, s.to, of[s.to.buffer], gates=of[s.gates], function=s.function)


def _route(s: Route, of: _Pass) -> None:
    norms.route(s, of[s.x], of[s.to])


def _sort(s: Sort, of: _Pass) -> None:
    """Do nothing: kernels look up the experts of each row by number."""


def _expert_linear(s: ExpertLinear, of: _Pass) -> None:
    x, routes, to = (of[b] for b in (s.x, s.routes, s.to))
    limited = s.limit, s.slope, s.shift
    linear.linear(x, s.weight, to, activation=s.activation, gated=s.gated, routes=routes, limited=limited)


def _combine(s: Combine, of: _Pass) -> None:
    rowwise.combine(of[s.x], of[s.routes], s.to, of[s.to.buffer], weighed=s.weighed)


def _weigh(s: Weigh, of: _Pass) -> None:
    rowwise.weigh(of[s.x], of[s.routes], of[s.to])


def _activate(s: steps.Activate, of: _Pass) -> None:
    rowwise.copy(of[s.x], s.to, of[s.to.buffer], function=s.function)


def _softmax(s: steps.Softmax, of: _Pass) -> None:
    norms.softmax(of[s.x], of[s.to])


def _sum(s: steps.Sum, of: _Pass) -> None:
    norms.sum_of(of[s.x], of[s.to])


def _gaussian_top_k(s: steps.GaussianTopK, of: _Pass) -> None:
    norms.gaussian_top_k(s, of[s.x], of[s.to])


def _xielu(s: steps.Xielu, of: _Pass) -> None:
    rowwise.xielu(s, of[s.x], of[s.to])


def _mix(s: steps.Mix, of: _Pass) -> None:
    rowwise.mix(s, of[s.x], of[s.coefficients], of[s.to.buffer])


def _convolve(s: Convolve, of: _Pass) -> None:
    state_kernels.convolve(s, of[s.x], of.spans, of[s.to])


def _delta_rule(s: DeltaRule, of: _Pass) -> None:
    state_kernels.recur(s, of[s.qkv], of[s.decay], of[s.strength], of.spans, of[s.to])


def _state_space(s: StateSpace, of: _Pass) -> None:
    state_kernels.recur(s, of[s.qkv], of[s.decay], None, of.spans, of[s.to])


def _selective_scan(s: SelectiveScan, of: _Pass) -> None:
    state_kernels.scan(s, of[s.x], of[s.times], of[s.kq], of.spans, of[s.to])


def _watch(s: Watch, of: _Pass) -> None:
    rowwise.watch(of[s.x], of.broken)


KERNELS: dict[type[Step], Callable[[Any, _Pass], None]] = {
    steps.Embed: _embed,
    steps.EmbedColumn: _embed_column,
    steps.EmbedPositions: _embed_positions,
    steps.Norm: _norm,
    steps.Linear: _linear,
    steps.HeadLinear: _head_linear,
    steps.ScoredLinear: _scored_linear,
    steps.Score: _score,
    steps.Rotate: _rotate,
    steps.Attend: _attend,
    steps.Copy: _copy,
    steps.Take: _take,
    steps.Gate: _gate,
    Route: _route,
    Sort: _sort,
    ExpertLinear: _expert_linear,
    Combine: _combine,
    Weigh: _weigh,
    steps.Activate: _activate,
    steps.Softmax: _softmax,
    steps.Sum: _sum,
    Convolve: _convolve,
    DeltaRule: _delta_rule,
    StateSpace: _state_space,
    SelectiveScan: _selective_scan,
    Watch: _watch,
    steps.GaussianTopK: _gaussian_top_k,
    steps.Xielu: _xielu,
    steps.Mix: _mix,
}


class TritonRunner:
    """Runs a program with its arrays on a device.

    Args:
        program: the steps; later additions are ignored. Its arrays are converted to tensors.

    Attributes:
        program: as given.

    Raises:
        EngineError: if a kind of step has no kernel.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        for step in program.steps:
            if type(step) not in KERNELS:
                kind = type(step).__name__
                raise EngineError(f"step {step.name!r}: {kind} has no kernel for CUDA yet; use --device cpu")
        self._steps: list[Step] = [each(step, tensor) for step in program.steps]

    def run(
        self, rows: Rows, given: Mapping[Buffer, Array], take: Take | None = None, *, exact: bool = False
    ) -> torch.Tensor:
        """Run a pass: launch its kernels, without reading any number on the host.

        Args:
            rows: as for `Interpreter.run`, on the device; pieces without tokens are skipped, and rows of no piece
                attend to nothing.
            given: as for `Interpreter.run`.
            take: as for `Interpreter.run`.
            exact: whether to skip the rounding of inputs to whole numbers, which is slow.

        Returns:
            int8 [rows], 1 where a key of the last layer, or a watched entry, is not finite.
        """
        buffers = {buffer: tensor(x) for buffer, x in given.items()}
        rows = Rows(*(None if x is None else tensor(x) for x in rows))
        for x in (*buffers.values(), *(x for x in rows if x is not None and x is not rows.tables)):
            assert x.is_contiguous(), "kernels read one row behind the other"
        count, wanted, device = len(rows.ids), len(rows.wanted), rows.ids.device
        of = _Pass(rows, buffers, torch.zeros(count, dtype=torch.int8, device=device))
        with on(device):
            for step in self._steps:
                of.count = wanted if step.wanted else count
                if step.writes not in of.buffers:
                    of.buffers[step.writes] = torch.empty(max(count, wanted), step.writes.width, device=device)
                KERNELS[type(step)](widened(step) if exact else step, of)
                if take is not None:
                    take(step.name, of[step.writes])
        return of.broken
