"""Modules in the arithmetic `detgen-2`, called by transformers' forward of models without a program.

Promise: a row has the same bits whatever rows are beside it, however many, on any processor. All tensors are float32
unless stated otherwise; weights may be in 16 bits and are widened when read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from detgen.kernels.c.angles import turns
from detgen.kernels.c.call import Call
from detgen.kernels.c.panels import joined, stacked
from detgen.program import steps
from detgen.program.arrays import array, tensor
from detgen.program.experts import Combine, ExpertLinear, Sort
from detgen.program.operands import PANEL, Activation, Buffer, Into, Step
from detgen.program.program import Program

_POSITIONS = 2048  # positions for which angles are computed at first


def _call(reads: tuple[Buffer, ...], *made: Step) -> Call:
    program = Program(*reads)
    for step in made:
        program.add(step)
    return Call(program, reads, (made[-1].writes,))


class NativeLinear(nn.Module):
    """`x @ weight.T + bias`.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        joint = joined([weight.detach()], [] if bias is None else [bias.detach()])
        x, y = Buffer("x", self.in_features), Buffer("y", self.out_features)
        self._call = _call((x,), steps.Linear(name="linear", x=x, to=Into(y), weight=joint))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._call(x.reshape(-1, self.in_features))[0].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the shape, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class NativeNorm(nn.Module):
    """A norm of the last axis.

    Args:
        size: entries of that axis.
        weight: [size], [vectors, size] if each vector of a row has its own, or None for none.
        bias: shaped like the weight; None for none.
        epsilon: added to the mean square.
        centred: whether it is a layer norm instead of a root-mean-square norm.
    """

    def __init__(
        self, size: int, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, *, centred: bool
    ) -> None:
        super().__init__()
        vectors = 1 if weight is None else weight.numel() // size
        shape = (vectors, size) if vectors > 1 else (size,)
        own = [None if p is None else array(p.detach().float().contiguous().view(shape)) for p in (weight, bias)]
        self._row = vectors * size
        x, y = Buffer("x", self._row), Buffer("y", self._row)
        norm = steps.Norm(
            name="norm",
            x=x,
            to=Into(y),
            vectors=vectors,
            size=size,
            weight=own[0],
            bias=own[1],
            own=vectors > 1,
            epsilon=epsilon,
            centred=centred,
        )
        self._call = _call((x,), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]; [..., vectors, size] if each vector has its own weight."""
        return self._call(x.reshape(-1, self._row))[0].view(x.shape)


class ByRow:
    """A step that depends only on the length of rows.

    Args:
        step: makes the step, given the buffers that it reads and writes.
        outputs: entries of a row of results; None for as many as are read.
    """

    def __init__(self, step: Callable[[Buffer, Buffer], Step], outputs: int | None = None) -> None:
        self._step, self._outputs = step, outputs
        self._calls: dict[int, Call] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., outputs]."""
        width = x.shape[-1]
        if width not in self._calls:
            read, written = Buffer("x", width), Buffer("y", self._outputs or width)
            self._calls[width] = _call((read,), self._step(read, written))
        return self._calls[width](x.reshape(-1, width))[0].view(*x.shape[:-1], -1)


def by_softmax() -> ByRow:
    """Return the softmax over the last axis."""
    return ByRow(lambda x, y: steps.Softmax(name="softmax", x=x, to=y))


def by_sum() -> ByRow:
    """Return the sum over the last axis, [..., n] -> [..., 1]."""
    return ByRow(lambda x, y: steps.Sum(name="sum", x=x, to=y), 1)


def by_activation(function: Activation) -> ByRow:
    """Return an activation as a function of each entry."""
    return ByRow(lambda x, y: steps.Activate(name="activation", x=x, to=Into(y), function=function))


class NativeActivation(nn.Module):
    """An activation function."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._function = by_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., columns]."""
        return self._function(x)


class NativeFeedForward(nn.Module):
    """A feed-forward layer.

    Args:
        up: the first linear layers, weights [inner, hidden] and biases: a gate and what it opens, one of both, or one
            without a gate.
        down: the last linear layer, [hidden, inner], and its bias.
        activation: of the gate, or of `up`.
        gated: whether there is a gate.
    """

    def __init__(
        self,
        up: tuple[list[torch.Tensor], list[torch.Tensor]],
        down: tuple[torch.Tensor, torch.Tensor | None],
        activation: Activation,
        *,
        gated: bool,
    ) -> None:
        super().__init__()
        weight, bias = down
        self._width, inner = weight.shape
        x, activated, y = Buffer("x", up[0][0].shape[1]), Buffer("activated", inner), Buffer("y", self._width)
        first = joined(*up, gated=gated)
        last = joined([weight], [] if bias is None else [bias])
        opened = steps.Linear(name="up", x=x, to=Into(activated), weight=first, activation=activation, gated=gated)
        self._call = _call((x,), opened, steps.Linear(name="down", x=activated, to=Into(y), weight=last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self._call(x.reshape(-1, x.shape[-1]))[0].view(*x.shape[:-1], self._width)


class NativeExperts(nn.Module):
    """Gated feed-forward layers, of which each row takes some.

    Args:
        up: gates and what they open, [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].
        activation: of the gates.
    """

    def __init__(self, up: torch.Tensor, down: torch.Tensor, activation: Activation) -> None:
        super().__init__()
        self._experts, self._hidden, self._inner = down.shape
        self._up = stacked([list(weight.chunk(2)) for weight in up.detach()], PANEL // 2)
        self._down = stacked([[weight] for weight in down.detach()], PANEL)
        self._activation = activation
        self._calls: dict[int, Call] = {}

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up the results of each row's experts, in order of the experts' numbers.

        Args:
            hidden: [rows, hidden].
            chosen: int64 [rows, experts per row].
            weights: [rows, experts per row].

        Returns:
            [rows, hidden].
        """
        chosen, order = chosen.sort(dim=-1, stable=True)
        routes = torch.stack((chosen.float(), weights.gather(-1, order)), dim=-1).flatten(1)
        picks = chosen.shape[1]
        if picks not in self._calls:
            self._calls[picks] = self._steps(picks)
        return self._calls[picks](hidden, routes)[0]

    def _steps(self, picks: int) -> Call:
        x, routes, y = Buffer("x", self._hidden), Buffer("routes", 2 * picks), Buffer("y", self._hidden)
        activated, each = Buffer("activated", picks * self._inner), Buffer("each", picks * self._hidden)
        return _call(
            (x, routes),
            Sort(name="rows of experts", routes=routes, experts=self._experts),
            ExpertLinear(
                name="up",
                x=x,
                routes=routes,
                to=activated,
                weight=self._up,
                activation=self._activation,
                gated=True,
            ),
            ExpertLinear(name="down", x=activated, routes=routes, to=each, weight=self._down),
            Combine(name="combined", x=each, routes=routes, to=Into(y)),
        )


class NativeAngles(nn.Module):
    """Cosines and sines of a rotary embedding, for transformers' own rotation.

    Args:
        rotaries: frequencies, float32 [n], and the amplitude of the cosines and sines, by kind of layer; the key is
            None if all layers are alike.
        order: the index of the angle of each entry of a row, int64 [entries].
        config: of the embedding; some models read settings from it.
    """

    def __init__(
        self, rotaries: Mapping[str | None, tuple[np.ndarray, float]], order: torch.Tensor, config: object = None
    ) -> None:
        super().__init__()
        self._rotaries, self._order, self.config = rotaries, order, config
        self._reach(_POSITIONS)

    def _reach(self, positions: int) -> None:
        self._positions = positions
        self._tables = {
            kind: [tensor(x)[:, self._order].contiguous() for x in turns(*rotary, 0, positions)]
            for kind, rotary in self._rotaries.items()
        }

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [..., entries] of positions, int64 [...]; x is not read."""
        with torch._C.DisableTorchFunction():  # only extends the tables, which the census need not see
            last = int(position_ids.numpy().max(initial=0))
        if last >= self._positions:
            self._reach(1 << last.bit_length())
        cosines, sines = self._tables[layer_type]
        return cosines[position_ids], sines[position_ids]
