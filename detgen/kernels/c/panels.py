"""Weights of linear layers in the layout that back ends read: panels of 32 columns, unchanged or in few bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from detgen.kernels.c import huge_pages
from detgen.kernels.c.layout import Arrangement
from detgen.kernels.c.library import best_build
from detgen.kernels.c.quantizing import (
    MADE,
    PAIRED,
    STORAGE,
    Empty,
    Form,
    Quantized,
    alike,
    empty,
    fits,
    places_of,
    quantize,
    rows_of,
    with_rows,
)
from detgen.kernels.c.threads import threads
from detgen.program.arrays import Array, array
from detgen.program.operands import PANEL, Weight
from detgen.program.storage import FORMATS, Storage


def panels(
    weights: Sequence[Array | Quantized],
    columns: int = PANEL,
    form: Form = "none",
    empty: Empty = huge_pages.empty,
) -> Weight:
    """Combine several weights into one.

    Args:
        weights: [outputs, inputs] each; kept in their quantization if all of them have the same one.
        columns: how many columns of each weight stand in a panel, so that a panel has columns of every weight; PANEL
            puts one weight after the other.
        form: the format to convert weights to, if they fit; those of `PAIRED` are for weights in bf16.
        empty: creates the arrays.

    Raises:
        EngineError: as for `quantize`.
    """
    found = alike([weight if isinstance(weight, Quantized) else array(weight) for weight in weights])
    floats = [weight for weight in found if isinstance(weight, np.ndarray)]
    if form in MADE and floats and fits(floats[0]):
        packed, few_scales = quantize(floats, columns, form, empty)
        return Weight(
            data=packed,
            scales=few_scales,
            outputs=sum(map(len, floats)) if columns == PANEL else len(floats[0]),
            columns=len(packed) * PANEL,
            inputs=floats[0].shape[1],
            storage=MADE[form],
        )
    few = [weight for weight in found if isinstance(weight, Quantized)]
    scales, codes = None, None
    if few:
        storage, codes, least = few[0].storage, few[0].codes, FORMATS[few[0].storage].least
        scales = few[0].scales.each(lambda *x: arranged(x, columns, empty), *(part.scales for part in few[1:]))
        parts = [part.whole for part in few]
        data = arranged(parts, columns, empty, storage, least if scales.minima is None else 0)
    else:
        storage, parts = STORAGE[floats[0].dtype.name], floats
        if storage == Storage.BFLOAT and floats[0].shape[1] % 2 == 0:
            storage = PAIRED.get(form, storage)
        data = arranged(floats, columns, empty, storage)
    return Weight(
        data=data,
        scales=scales,
        codes=codes,
        outputs=sum(map(len, parts)) if columns == PANEL else len(parts[0]),
        columns=len(data) * PANEL,
        inputs=parts[0].shape[1],
        storage=storage,
    )


def arranged(
    parts: Sequence[np.ndarray], columns: int, empty: Empty, storage: Storage | None = None, least: int = 0
) -> np.ndarray:
    """Arrange rows of numbers in panels, by arrange.c.

    Args:
        parts: [outputs, inputs] each, of one dtype.
        columns: as for `panels`.
        empty: as for `panels`.
        storage: the format to store them in, [panels, inputs / together, others]; None for [panels, inputs, PANEL].
        least: the smallest possible value of whole numbers.
    """
    kept, inputs = [with_rows(part) for part in parts], parts[0].shape[1]
    places, made = places_of(kept, columns), None if storage is None else FORMATS[storage]
    told = Arrangement(threads(), len(places), inputs, kept[0].itemsize, 1)
    width, dtype, table = PANEL, kept[0].dtype, None
    if made is not None:
        dtype = np.dtype(made.dtype)
        width = made.together * PANEL * made.bits // (8 * dtype.itemsize)
        told.together, (told.low, told.high), told.least = made.together, (*made.planes, 0, 0)[:2], least
        table = _codes(made.levels) if made.levels else None
    data = empty(len(places), inputs // told.together, width, dtype=dtype)
    told.rows, told.data = places.ctypes.data, data.ctypes.data
    told.table = None if table is None else ctypes.addressof(table)
    best_build().arrange(told)
    return data


@cache
def _codes(levels: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint8]:
    """Return the code of the level that each byte is; where two codes have the same level, the first."""
    found = {level % 256: code for code, level in reversed(list(enumerate(levels)))}
    return (ctypes.c_uint8 * 256)(*(found.get(byte, 0) for byte in range(256)))


def joined(
    weights: Sequence[Array | Quantized], biases: Sequence[Array], form: Form = "none", *, gated: bool = False
) -> Weight:
    """Join linear layers that read the same input into one: in sequence, or as pairs of a gate and what it opens.

    Args:
        weights: [outputs, inputs] each.
        biases: [outputs] each; empty for none.
        form: as for `panels`.
        gated: whether the weights are a gate and what it opens, or one weight of both.
    """
    columns = PANEL
    if gated:
        columns = PANEL // 2
        if len(weights) == 1:
            weights, biases = halves(weights[0]), [part for bias in biases for part in np.split(array(bias), 2)]
    packed = panels(weights, columns, form)
    if not biases:
        return packed
    return replace(packed, bias=_in_columns(biases, columns))


def _in_columns(biases: Sequence[Array], columns: int) -> np.ndarray:
    """Return biases in the layout of `Weight`."""
    found: np.ndarray = array(panels([array(bias)[:, None] for bias in biases], columns, empty=empty).data)
    return found.astype(np.float32).ravel()


def stacked(
    experts: Sequence[Sequence[Array | Quantized]],
    columns: int,
    form: Form = "none",
    biases: Sequence[Sequence[Array]] = (),
) -> Weight:
    """Stack the weights of experts; arguments per expert as for `panels`, biases as for `joined`."""
    first = panels(experts[0], columns, form, empty)

    def room(of: np.ndarray) -> np.ndarray:
        return huge_pages.empty(len(experts), *of.shape, dtype=of.dtype)

    data, scales = room(first.data), None if first.scales is None else first.scales.each(room)
    for i, weights in enumerate(experts):
        packed = panels(weights, columns, form, empty)
        data[i] = packed.data
        if scales is not None and packed.scales is not None:
            scales.each(lambda to, x, i=i: np.copyto(to[i], x), packed.scales)
    bias = np.stack([_in_columns(of, columns) for of in biases]) if biases else None
    return replace(first, data=data, scales=scales, bias=bias)


def halves(weight: Array | Quantized) -> list[Array | Quantized]:
    """Split one weight into a gate and what it opens."""
    half = weight.shape[0] // 2
    return [rows_of(weight, part) for part in (slice(half), slice(half, None))]
