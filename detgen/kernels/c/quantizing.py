"""Weights in few bits: whole numbers times a scale that a group of inputs shares.

What quantize.c quantizes is stored like llama.cpp's Q8_0, Q4_0 and Q4_K: scales are float16 numbers, one per 32 inputs,
or whole numbers times a float16 unit per 256. Where these do not divide a row, q4_k has scales and minima in float16,
like Q4_1. Files may have other scales (`Scales`), and numbers that stand for codes, like bitsandbytes' formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c import huge_pages
from detgen.kernels.c.layout import Quantization
from detgen.kernels.c.library import best_build
from detgen.kernels.c.threads import threads
from detgen.program.arrays import Array, array, floats
from detgen.program.operands import GROUP, PANEL, UNIT, Scales, Weight
from detgen.program.storage import FORMATS, Storage

# The target format of weights: unchanged, bf16 in pairs, or quantized here.
Form = Literal["none", "pairs", "tc25", "tc24", "q8", "q4", "q4_k"]
Empty = Callable[..., np.ndarray]  # creates an array of a shape, as `empty` does
MADE: dict[Form, Storage] = {"q8": Storage.BYTE, "q4": Storage.NIBBLE, "q4_k": Storage.NIBBLE}
PAIRED: dict[Form, Storage] = {"pairs": Storage.PAIR, "tc25": Storage.TC25, "tc24": Storage.TC24}
# The storage of unquantized numbers, by the names of their formats.
STORAGE = {made.dtype: storage for storage, made in FORMATS.items() if storage <= Storage.HALF}


def empty(*shape: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialized array."""
    return np.empty(shape, dtype)


class Quantized(NamedTuple):
    """Weights in few bits.

    Each is its whole number, or the code that it stands for, times its group's scale, rounded to float32, plus the
    group's minimum, rounded again.

    Attributes:
        whole: int8 [outputs, inputs], in the range of `storage`; or [experts, outputs, inputs].
        scales: [outputs, groups]; or [experts, outputs, groups].
        storage: the number format.
        codes: float32 [16], for -8 to 7; None if the whole numbers are literal.
    """

    whole: np.ndarray
    scales: Scales
    storage: Storage
    codes: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return self.whole.shape

    def rows(self, chosen: slice | np.ndarray | int) -> Quantized:
        """Select outputs; or experts, or one expert."""
        return self._replace(whole=self.whole[chosen], scales=self.scales.each(lambda x: x[chosen]))

    def columns(self, order: np.ndarray) -> Quantized | np.ndarray:
        """Reorder the inputs; returns float32 if that separates groups that share a scale."""
        scales, each = self.scales, np.arange(self.scales.group)
        groups = order[:: len(each)] // len(each)
        if not np.array_equal((groups[:, None] * len(each) + each).ravel(), order):
            return self.weight()[..., order]
        if scales.units is not None:  # shared by several groups
            steps, minima = scales.floats()
            scales = Scales(steps=steps, minima=minima, storage=Storage.FLOAT, group=len(each))
        return self._replace(whole=self.whole[..., order], scales=scales.each(lambda x: x[..., groups]))

    def weight(self) -> np.ndarray:
        """Return the weights in float32, [outputs, inputs]."""
        scales, minima = self.scales.floats()
        numbers = self.whole.astype(np.float32) if self.codes is None else self.codes[self.whole.astype(np.int64) + 8]
        groups = numbers.reshape(*numbers.shape[:-1], -1, self.scales.group)
        with np.errstate(over="ignore"):
            groups *= scales[..., None]
            if minima is not None:
                groups += minima[..., None]
        return groups.reshape(numbers.shape)


def kind(weight: Array | Quantized) -> Hashable:
    """Return what weights in few bits must have in common to be joined; None for unquantized weights."""
    if not isinstance(weight, Quantized):
        return None
    return weight.storage, weight.scales.kind, None if weight.codes is None else tuple(weight.codes.tolist())


def rows_of(weight: Array | Quantized, chosen: slice | np.ndarray | int) -> Array | Quantized:
    """Select outputs of a weight or a bias; or experts, or one expert."""
    return weight.rows(chosen) if isinstance(weight, Quantized) else array(weight)[chosen]


def alike(weights: Sequence[np.ndarray | Quantized]) -> Sequence[np.ndarray | Quantized]:
    """Convert weights to a common format; unchanged if they have one."""
    kinds = {kind(w) for w in weights}
    if len(kinds) == 1 and None not in kinds:
        return weights
    found = [w.weight() if isinstance(w, Quantized) else w for w in weights]
    return found if len({w.dtype for w in found}) == 1 else [floats(w) for w in found]


def cat(weights: Sequence[np.ndarray | Quantized], dim: int) -> np.ndarray | Quantized:
    """Concatenate weights in a common format."""
    return _together(weights, lambda *x: np.concatenate(x, dim))


def in_turns(weights: Sequence[np.ndarray | Quantized]) -> np.ndarray | Quantized:
    """Interleave weights of experts, [experts, outputs, ...] each, in a common format: all first outputs come first."""
    return _together(weights, lambda *x: np.stack(x, 2).reshape(len(x[0]), -1, *x[0].shape[2:]))


def _together(weights: Sequence[np.ndarray | Quantized], join: Callable[..., np.ndarray]) -> np.ndarray | Quantized:
    """Combine weights in a common format; `join` combines one array of each."""
    weights = alike(weights)
    if len(weights) == 1:
        return weights[0]
    few = [w for w in weights if isinstance(w, Quantized)]
    if few:
        scales = few[0].scales.each(join, *(w.scales for w in few[1:]))
        return few[0]._replace(whole=join(*(w.whole for w in few)), scales=scales)
    return join(*(w for w in weights if isinstance(w, np.ndarray)))


def quantize(weights: Sequence[np.ndarray], columns: int, form: Form, empty: Empty) -> tuple[np.ndarray, Scales]:
    """Quantize weights into panels; return data and scales in the layout of `Weight`.

    In q8, the largest magnitude of a group becomes 127 or -127; in q4, -8, so that 7 is the largest number of the other
    sign; in q4_k, scale and minimum are searched for (quantize.c).

    Args:
        weights: [outputs, inputs] each, of one number format, with whole groups of inputs.
        columns: how many columns of each weight stand in a panel; PANEL puts one weight after the other.
        form: one of `MADE`.
        empty: creates the arrays.

    Raises:
        EngineError: if a weight is infinite, not a number, or too large.
    """
    inputs = weights[0].shape[1]
    kept = [with_rows(weight) for weight in weights]
    places, made = places_of(kept, columns), FORMATS[MADE[form]]
    width = made.together * PANEL * made.bits // 8
    data = empty(len(places), inputs // made.together, width, dtype=np.dtype(np.uint8))
    scales = _room(len(places), inputs, form, empty)
    told = _told(STORAGE[kept[0].dtype.name], len(places), inputs, form, scales)
    told.rows, told.data = places.ctypes.data, data.ctypes.data
    _run(told, form)
    return data, scales


def with_rows(x: np.ndarray) -> np.ndarray:
    """Return the array, [rows, entries], with contiguous rows."""
    return x if x.strides[1] == x.itemsize else np.ascontiguousarray(x)


def places_of(arrays: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Return the addresses of the columns of panels, int64 [panels, PANEL], 0 after the last column.

    Args:
        arrays: with contiguous rows, one per part of a panel; or any number, one after the other.
        columns: columns of a part.
    """
    rows = [x.ctypes.data + x.strides[0] * np.arange(len(x), dtype=np.int64) for x in arrays]
    if columns == PANEL:
        rows = [np.concatenate(rows)]
    filled = [np.pad(x, (0, -len(x) % columns)).reshape(-1, columns) for x in rows]
    return np.ascontiguousarray(np.concatenate(filled, axis=1)).reshape(-1, PANEL)


def quantized(weight: Weight, form: Form) -> Weight:
    """Quantize a weight that is in panels already, in floating point, with whole groups of inputs.

    Raises:
        EngineError: as for `quantize`.
    """
    made, shape, source = FORMATS[MADE[form]], weight.data.shape[:-2], array(weight.data)
    count = math.prod(shape)
    width = made.together * PANEL * made.bits // 8
    data = huge_pages.empty(count, weight.inputs // made.together, width, dtype=np.dtype(np.uint8))
    scales = _room(count, weight.inputs, form, huge_pages.empty)
    told = _told(weight.storage, count, weight.inputs, form, scales)
    told.packed, told.data = source.ctypes.data, data.ctypes.data
    _run(told, form)
    found = scales.each(lambda x: x.reshape(*shape, *x.shape[1:]))
    return replace(weight, data=data.reshape(*shape, *data.shape[1:]), scales=found, codes=None, storage=MADE[form])


def narrowed(weight: np.ndarray, form: Form) -> np.ndarray:
    """Return in float32 what a weight, [..., inputs], becomes in a form; unchanged if it does not fit.

    Raises:
        EngineError: as for `quantize`.
    """
    if form not in MADE or weight.ndim < 2 or weight.shape[-1] % GROUP:
        return floats(weight)
    weight = np.ascontiguousarray(weight)
    count, inputs = weight.size // weight.shape[-1], weight.shape[-1]
    rows = weight.ctypes.data + weight.itemsize * inputs * np.arange(count, dtype=np.int64)
    places, made = np.pad(rows, (0, -count % PANEL)).reshape(-1, PANEL), np.empty(weight.shape, np.float32)
    scales = _room(1, UNIT if inputs % UNIT == 0 else GROUP, form, empty)
    told = _told(STORAGE[weight.dtype.name], len(places), inputs, form, scales)
    told.rows, told.floats = places.ctypes.data, made.ctypes.data
    _run(told, form)
    return made


def bytes_of(panels: int, inputs: int, form: Form) -> int:
    """Return the bytes of a result of `quantized`."""
    return panels * (inputs * PANEL * FORMATS[MADE[form]].bits // 8 + _room(1, inputs, form, empty).nbytes)


def fits(weight: np.ndarray | Quantized) -> bool:
    """Return whether a weight, [outputs, inputs], has whole groups of inputs."""
    return len(weight.shape) == 2 and weight.shape[1] % GROUP == 0


def _room(panels: int, inputs: int, form: Form, empty: Empty) -> Scales:
    """Allocate the scales of a format."""

    def of(each: int, dtype: type[np.generic]) -> np.ndarray:
        return empty(panels, inputs // each, PANEL, dtype=np.dtype(dtype))

    if form == "q4_k" and inputs % UNIT == 0:
        steps, units = [[of(each, dtype) for _ in range(2)] for each, dtype in ((GROUP, np.int8), (UNIT, np.float16))]
        return Scales(steps=steps[0], units=units[0], minima=steps[1], minimum_units=units[1], storage=Storage.BYTE)
    minima = of(GROUP, np.float16) if form == "q4_k" else None
    return Scales(steps=of(GROUP, np.float16), minima=minima, storage=Storage.HALF)


def _told(stored: Storage, panels: int, inputs: int, form: Form, scales: Scales) -> Quantization:
    """Describe weights and their scales to the library."""
    told = Quantization(threads(), stored, MADE[form], panels, inputs)
    for name in ("steps", "units", "minima", "minimum_units"):
        found = getattr(scales, name)
        setattr(told, name, None if found is None else found.ctypes.data)
    return told


def _run(told: Quantization, form: Form) -> None:
    if best_build().quantize(told):
        raise EngineError(f"a weight is infinite, not a number, or too large for {form}; leave out the quantization")
