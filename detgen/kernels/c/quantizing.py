"""Weights in few bits: whole numbers times a scale that a group of inputs shares.

What is quantized here, by quantize.c, is stored as llama.cpp's Q8_0, Q4_0 and Q4_K: scales are float16 numbers, each of
32 inputs, or whole numbers times a float16 unit of 256. Where these do not divide a row, q4_k has scales and minima in
float16, like Q4_1. Files may have others (`Scales`), and whole numbers that stand for codes: bitsandbytes' formats do.
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

# What becomes of weights: they stay as they are, bf16 stands in pairs, or they are quantized here.
Form = Literal["none", "pairs", "tc25", "tc24", "q8", "q4", "q4_k"]
Empty = Callable[..., np.ndarray]  # makes an array of a shape, as `empty` does
MADE: dict[Form, Storage] = {"q8": Storage.BYTE, "q4": Storage.NIBBLE, "q4_k": Storage.NIBBLE}
PAIRED: dict[Form, Storage] = {"pairs": Storage.PAIR, "tc25": Storage.TC25, "tc24": Storage.TC24}
# Of numbers as they are, by the names of their formats.
STORAGE = {made.dtype: storage for storage, made in FORMATS.items() if storage <= Storage.HALF}


def empty(*shape: int, dtype: np.dtype[Any]) -> np.ndarray:
    """An array whose numbers are not set."""
    return np.empty(shape, dtype)


class Quantized(NamedTuple):
    """Weights in few bits.

    Each is its whole number, or the code of it, times its group's scale, rounded to float32, plus the group's minimum,
    rounded again.

    Attributes:
        whole: int8 [outputs, inputs], as many as `storage` has; or [experts, outputs, inputs].
        scales: [outputs, groups], likewise.
        storage: how it is stored.
        codes: float32 [16], those of -8 to 7; None where whole numbers are what they are.
    """

    whole: np.ndarray
    scales: Scales
    storage: Storage
    codes: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights."""
        return self.whole.shape

    def rows(self, chosen: slice | np.ndarray | int) -> Quantized:
        """Some outputs; some experts, or one."""
        return self._replace(whole=self.whole[chosen], scales=self.scales.each(lambda x: x[chosen]))

    def columns(self, order: np.ndarray) -> Quantized | np.ndarray:
        """Its inputs in another order; float32 where that takes groups apart that share a scale."""
        scales, each = self.scales, np.arange(self.scales.group)
        groups = order[:: len(each)] // len(each)
        if not np.array_equal((groups[:, None] * len(each) + each).ravel(), order):
            return self.weight()[..., order]
        if scales.units is not None:  # which several groups share
            steps, minima = scales.floats()
            scales = Scales(steps=steps, minima=minima, storage=Storage.FLOAT, group=len(each))
        return self._replace(whole=self.whole[..., order], scales=scales.each(lambda x: x[..., groups]))

    def weight(self) -> np.ndarray:
        """float32 [outputs, inputs]."""
        scales, minima = self.scales.floats()
        numbers = self.whole.astype(np.float32) if self.codes is None else self.codes[self.whole.astype(np.int64) + 8]
        groups = numbers.reshape(*numbers.shape[:-1], -1, self.scales.group)
        with np.errstate(over="ignore"):
            groups *= scales[..., None]
            if minima is not None:
                groups += minima[..., None]
        return groups.reshape(numbers.shape)


def kind(weight: Array | Quantized) -> Hashable:
    """What weights in few bits that can be joined have in common; None of those that are not quantized."""
    if not isinstance(weight, Quantized):
        return None
    return weight.storage, weight.scales.kind, None if weight.codes is None else tuple(weight.codes.tolist())


def rows_of(weight: Array | Quantized, chosen: slice | np.ndarray | int) -> Array | Quantized:
    """Some outputs of a weight, or of a bias; some experts, or one."""
    return weight.rows(chosen) if isinstance(weight, Quantized) else array(weight)[chosen]


def alike(weights: Sequence[np.ndarray | Quantized]) -> Sequence[np.ndarray | Quantized]:
    """The weights in one form, as they are if they have one."""
    kinds = {kind(w) for w in weights}
    if len(kinds) == 1 and None not in kinds:
        return weights
    found = [w.weight() if isinstance(w, Quantized) else w for w in weights]
    return found if len({w.dtype for w in found}) == 1 else [floats(w) for w in found]


def cat(weights: Sequence[np.ndarray | Quantized], dim: int) -> np.ndarray | Quantized:
    """The weights, one behind the other, in one form."""
    return _together(weights, lambda *x: np.concatenate(x, dim))


def in_turns(weights: Sequence[np.ndarray | Quantized]) -> np.ndarray | Quantized:
    """Weights of experts, [experts, outputs, ...] each, in one form: all first outputs, then all second ones."""
    return _together(weights, lambda *x: np.stack(x, 2).reshape(len(x[0]), -1, *x[0].shape[2:]))


def _together(weights: Sequence[np.ndarray | Quantized], join: Callable[..., np.ndarray]) -> np.ndarray | Quantized:
    """One weight of several, in one form; `join` makes one array of those of all."""
    weights = alike(weights)
    if len(weights) == 1:
        return weights[0]
    few = [w for w in weights if isinstance(w, Quantized)]
    if few:
        scales = few[0].scales.each(join, *(w.scales for w in few[1:]))
        return few[0]._replace(whole=join(*(w.whole for w in few)), scales=scales)
    return join(*(w for w in weights if isinstance(w, np.ndarray)))


def quantize(weights: Sequence[np.ndarray], columns: int, form: Form, empty: Empty) -> tuple[np.ndarray, Scales]:
    """Weights in few bits, in panels: data and scales, as `Weight` has them.

    Of q8, the largest magnitude of a group becomes 127 or -127; of q4, -8, so that 7 is the largest number of the other
    sign; of q4_k, scale and minimum are searched for (quantize.c).

    Args:
        weights: [outputs, inputs] each, of one number format; inputs are whole groups.
        columns: how many columns of each of them stand in a panel; PANEL puts them one behind the other.
        form: one of `MADE`.
        empty: makes the arrays.

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
    """The array, [rows, entries], with the entries of a row behind each other."""
    return x if x.strides[1] == x.itemsize else np.ascontiguousarray(x)


def places_of(arrays: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Where the columns of panels lie in memory, int64 [panels, PANEL], 0 behind the last ones.

    Args:
        arrays: `with_rows`, one for each part of a panel; or, behind each other, as many as there are.
        columns: of a part.
    """
    rows = [x.ctypes.data + x.strides[0] * np.arange(len(x), dtype=np.int64) for x in arrays]
    if columns == PANEL:
        rows = [np.concatenate(rows)]
    filled = [np.pad(x, (0, -len(x) % columns)).reshape(-1, columns) for x in rows]
    return np.ascontiguousarray(np.concatenate(filled, axis=1)).reshape(-1, PANEL)


def quantized(weight: Weight, form: Form) -> Weight:
    """A weight in few bits, of one that is in panels already, of numbers in floating point and whole groups of inputs.

    Raises:
        EngineError: as `quantize`.
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
    """float32, what a weight, [..., inputs], stands for once it is in a form; as it is if it does not fit.

    Raises:
        EngineError: as `quantize`.
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
    """What `quantized` makes takes, in bytes."""
    return panels * (inputs * PANEL * FORMATS[MADE[form]].bits // 8 + _room(1, inputs, form, empty).nbytes)


def fits(weight: np.ndarray | Quantized) -> bool:
    """Whether a weight, [outputs, inputs], has whole groups of inputs."""
    return len(weight.shape) == 2 and weight.shape[1] % GROUP == 0


def _room(panels: int, inputs: int, form: Form, empty: Empty) -> Scales:
    """Scales of a format, to be filled in."""

    def of(each: int, dtype: type[np.generic]) -> np.ndarray:
        return empty(panels, inputs // each, PANEL, dtype=np.dtype(dtype))

    if form == "q4_k" and inputs % UNIT == 0:
        steps, units = [[of(each, dtype) for _ in range(2)] for each, dtype in ((GROUP, np.int8), (UNIT, np.float16))]
        return Scales(steps=steps[0], units=units[0], minima=steps[1], minimum_units=units[1], storage=Storage.BYTE)
    minima = of(GROUP, np.float16) if form == "q4_k" else None
    return Scales(steps=of(GROUP, np.float16), minima=minima, storage=Storage.HALF)


def _told(stored: Storage, panels: int, inputs: int, form: Form, scales: Scales) -> Quantization:
    """What the library is told of weights and their scales."""
    told = Quantization(threads(), stored, MADE[form], panels, inputs)
    for name in ("steps", "units", "minima", "minimum_units"):
        found = getattr(scales, name)
        setattr(told, name, None if found is None else found.ctypes.data)
    return told


def _run(told: Quantization, form: Form) -> None:
    if best_build().quantize(told):
        raise EngineError(f"a weight is infinite, not a number, or too large for {form}; leave out the quantization")
