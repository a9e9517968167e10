"""What a pass does, as a list of steps on buffers of rows; the structures of program.h.

Knows tensors; knows no models.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import torch

BLOCK = 128  # logits of a row that are scored together
SCORED = 4  # floats of what SCORE makes of a row: the largest, the next, the logarithm of the sum, the largest's place


class Kind(IntEnum):
    """Kinds of steps."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    COPY = 5
    ROUTE = 6
    SORT = 7
    COMBINE = 8
    SCORE = 9
    ACTIVATE = 10
    SOFTMAX = 11
    SUM = 12


class Norm(IntEnum):
    """Kinds of norms."""

    RMS = 0
    LAYER = 1


class Activation(IntEnum):
    """What becomes of a linear layer's results, up to `RELU`; a step of its own has all of them."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4
    SIGMOID = 5
    TANH = 6
    ROOT = 7
    RECIPROCAL_ROOT = 8


class Step(ctypes.Structure):
    """`Step` of program.h, which says what its fields mean."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "source", "source_at", "to", "to_at", "wanted", "add")),
        *((name, c_double) for name in ("factor", "softcap")),
        *((name, c_void_p) for name in ("weight", "scales", "bias")),
        *((name, c_int64) for name in ("columns", "inputs", "storage", "variant", "gated", "scored")),
        *((name, c_int64) for name in ("weight_step", "offset")),
        *((name, c_int64) for name in ("experts", "picks", "routes", "source_step", "to_step")),
        ("epsilon", c_double),
        *(
            (name, c_int64)
            for name in ("heads", "kv_heads", "size", "values", "turned", "interleaved", "window", "chunk", "last")
        ),
        ("scale", c_double),
        *((name, c_void_p) for name in ("cosines", "sines", "keys", "kept")),
    )


class Program(ctypes.Structure):
    """`Program` of program.h."""

    _fields_ = (("steps", ctypes.POINTER(Step)), ("count", c_int64), ("buffers", c_int64), ("widths", c_void_p))


class Pass(ctypes.Structure):
    """`Pass` of program.h."""

    _fields_ = (
        *((name, c_int64) for name in ("threads", "rows", "wanted", "pieces", "blocks")),
        *((name, c_void_p) for name in ("ids", "positions", "places", "want", "piece", "tables", "given", "broken")),
        ("most", c_double),
    )


class Chain(ctypes.Structure):
    """`Chain` of program.h."""

    _fields_ = (
        *((name, c_int64) for name in ("steps", "ending")),
        *((name, c_void_p) for name in ("ends", "to_end", "slots", "lengths", "results", "broken", "draws", "tokens")),
    )


class Builder:
    """Collects steps, and keeps the tensors that they point to.

    Attributes:
        buffers: number of each buffer, by its name.
        widths: floats of a row of each.
        steps: in their order.
        names: theirs.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, int] = {}
        self.widths: list[int] = []
        self.steps: list[Step] = []
        self.names: list[str] = []
        self._held: list[torch.Tensor] = []

    def buffer(self, name: str, width: int) -> None:
        """A buffer with rows of `width` floats at least."""
        number = self.buffers.setdefault(name, len(self.widths))
        if number == len(self.widths):
            self.widths.append(width)
        self.widths[number] = max(self.widths[number], width)

    def step(self, name: str, kind: Kind, *, to: str, source: str | None = None, **fields: Any) -> None:
        """Append a step.

        Args:
            name: for those who look into passes.
            kind: of the step.
            to: the buffer that is written.
            source: the one that is read, if any.
            fields: others of the step; tensors stand for their addresses.
        """
        places = {"to": self.buffers[to], "source": 0 if source is None else self.buffers[source]}
        self.steps.append(
            Step(kind=kind, **{"factor": 1.0, **places, **{n: self._plain(v) for n, v in fields.items()}})
        )
        self.names.append(name)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._held.append(value)
        return value.data_ptr()
