"""Modules of a model in the arithmetic `detgen-1`: what transformers' forward calls where no native decoder knows it.

Promise: a row has the same bits whatever rows stand beside it, however many there are, on any processor. All tensors
are float32 unless it is said; weights may be in 16 bits and are widened when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from detgen.kernels.native.angles import turns
from detgen.kernels.native.call import Call
from detgen.kernels.native.panels import PANEL, joined, stacked
from detgen.kernels.native.program import Activation, Builder, Kind, Norm

Fields = dict[str, Any]
_POSITIONS = 2048  # for which angles are worked out at first


def _one_step(kind: Kind, width: int, to: int, **fields: Any) -> Call:
    builder = Builder()
    builder.buffer("x", width)
    builder.buffer("y", to)
    builder.step("step", kind, source="x", to="y", **fields)
    return Call(builder, ("x",), ("y",))


class NativeLinear(nn.Module):
    """`x @ weight.T + bias`.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        fields = joined([weight.detach()], [] if bias is None else [bias.detach()])
        self._call = _one_step(Kind.LINEAR, self.in_features, self.out_features, **fields)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._call(x.reshape(-1, self.in_features))[0].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shape, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class NativeNorm(nn.Module):
    """A norm of the last axis.

    Args:
        size: entries of that axis.
        weight: [size], [vectors, size] if each vector of a row has its own, or None for none.
        bias: like it.
        epsilon: is added to the mean square.
        centred: whether it is a layer norm instead of a root-mean-square norm.
    """

    def __init__(
        self, size: int, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, *, centred: bool
    ) -> None:
        super().__init__()
        vectors = 1 if weight is None else weight.numel() // size
        fields: Fields = {"epsilon": epsilon, "columns": size, "inputs": vectors, "weight_step": size}
        fields["variant"] = Norm.LAYER if centred else Norm.RMS
        for name, part in (("weight", weight), ("bias", bias)):
            fields |= {} if part is None else {name: part.detach().float().contiguous()}
        self._row = vectors * size
        self._call = _one_step(Kind.NORM, self._row, self._row, **fields)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]; [..., vectors, size] where each has its own weight."""
        return self._call(x.reshape(-1, self._row))[0].view(x.shape)


class ByRow:
    """A step that only depends on how long rows are."""

    def __init__(self, kind: Kind, variant: Activation = Activation.NONE) -> None:
        self._kind, self._variant = kind, variant
        self._calls: dict[int, Call] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., n], or [..., 1] of a sum."""
        width = x.shape[-1]
        if width not in self._calls:
            to = 1 if self._kind == Kind.SUM else width
            self._calls[width] = _one_step(self._kind, width, to, columns=width, variant=self._variant)
        return self._calls[width](x.reshape(-1, width))[0].view(*x.shape[:-1], -1)


class NativeActivation(nn.Module):
    """An activation function."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._function = ByRow(Kind.ACTIVATE, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] -> [..., columns]."""
        return self._function(x)


class NativeFeedForward(nn.Module):
    """A feed-forward.

    Args:
        up: its first linear layers, weights [inner, hidden] and biases: a gate and what it opens, one of both, or one
            without a gate.
        down: its last one, [hidden, inner].
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
        builder = Builder()
        for name, width in (("x", up[0][0].shape[1]), ("activated", inner), ("y", self._width)):
            builder.buffer(name, width)
        first = joined(*up, gated=gated)
        last = joined([weight], [] if bias is None else [bias])
        builder.step("up", Kind.LINEAR, **first, gated=gated, variant=activation, source="x", to="activated")
        builder.step("down", Kind.LINEAR, **last, source="activated", to="y")
        self._call = Call(builder, ("x",), ("y",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self._call(x.reshape(-1, x.shape[-1]))[0].view(*x.shape[:-1], self._width)


class NativeExperts(nn.Module):
    """Gated feed-forwards of which each row takes some.

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
        """Sum of each row's experts, in order of their numbers.

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
        builder = Builder()
        widths = {"x": self._hidden, "routes": 2 * picks, "activated": picks * self._inner}
        for name, width in {**widths, "each": picks * self._hidden, "y": self._hidden}.items():
            builder.buffer(name, width)
        count: Fields = {"experts": self._experts, "picks": picks}
        up: Fields = {**self._up, **count, "gated": 1, "variant": self._activation, "to_step": self._inner}
        down: Fields = {**self._down, **count, "source_step": self._inner, "to_step": self._hidden}
        builder.step("rows of experts", Kind.SORT, **count, source="routes", to="routes")
        builder.step("up", Kind.LINEAR, **up, source="x", to="activated")
        builder.step("down", Kind.LINEAR, **down, source="activated", to="each")
        combined: Fields = {**count, "routes": builder.buffers["routes"], "columns": self._hidden}
        builder.step("combined", Kind.COMBINE, **combined, source="each", to="y")
        return Call(builder, ("x", "routes"), ("y",))


class NativeAngles(nn.Module):
    """Cosines and sines of a rotary embedding, for transformers' own rotation.

    Args:
        rotaries: frequencies, float32 [n], and the amplitude of the cosines and sines, by the kind of layer; one for
            None where all are alike.
        order: which of the n angles each entry of a row has, int64 [entries].
    """

    def __init__(self, rotaries: Mapping[str | None, tuple[np.ndarray, float]], order: torch.Tensor) -> None:
        super().__init__()
        self._rotaries, self._order = rotaries, order
        self._reach(_POSITIONS)

    def _reach(self, positions: int) -> None:
        self._positions = positions
        self._tables = {
            kind: [x[:, self._order].contiguous() for x in turns(*rotary, 0, positions)]
            for kind, rotary in self._rotaries.items()
        }

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [..., entries] of positions, int64 [...]; x is not read."""
        with torch._C.DisableTorchFunction():  # only room is made: the census need not know
            last = int(position_ids.numpy().max(initial=0))
        if last >= self._positions:
            self._reach(1 << last.bit_length())
        cosines, sines = self._tables[layer_type]
        return cosines[position_ids], sines[position_ids]
