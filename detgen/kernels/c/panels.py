"""Weights of linear layers as back ends read them: in panels of 32 columns, as they are or in few bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from detgen.kernels.c import huge_pages
from detgen.kernels.c.layout import Arrangement
from detgen.kernels.c.library import best_build
from detgen.kernels.c.quantizing import (
    MADE,
    STORAGE,
    Empty,
    Form,
    Quantized,
    alike,
    fits,
    places_of,
    quantize,
    with_rows,
)
from detgen.program.operands import PANEL, Weight
from detgen.program.storage import FORMATS, Storage


def panels(
    weights: Sequence[torch.Tensor | Quantized],
    columns: int = PANEL,
    form: Form = "none",
    empty: Empty = huge_pages.empty,
) -> Weight:
    """One weight of several.

    Args:
        weights: [outputs, inputs] each; what is quantized stays as it is if all of them are so.
        columns: how many columns of each of the weights stand in a panel, which has some of all of them; PANEL puts the
            weights one behind the other.
        form: what becomes of them, where they fit; pairs are for those in bf16.
        empty: makes the tensors.

    Raises:
        EngineError: as `quantize`.
    """
    found: Sequence[torch.Tensor | Quantized] = alike(weights)
    floats = [weight for weight in found if isinstance(weight, torch.Tensor)]
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
        storage, parts = STORAGE[floats[0].dtype], floats
        if form == "pairs" and storage == Storage.BFLOAT and floats[0].shape[1] % 2 == 0:
            storage = Storage.PAIR
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
    parts: Sequence[torch.Tensor], columns: int, empty: Empty, storage: Storage | None = None, least: int = 0
) -> torch.Tensor:
    """Rows of numbers in panels, by arrange.c.

    Args:
        parts: [outputs, inputs] each, of one dtype.
        columns: as of `panels`.
        empty: likewise.
        storage: how they are stored, [panels, inputs / together, others]; None for [panels, inputs, PANEL].
        least: of whole numbers, the smallest that there may be.
    """
    kept, inputs = [with_rows(part) for part in parts], parts[0].shape[1]
    places, made = places_of(kept, columns), None if storage is None else FORMATS[storage]
    told = Arrangement(torch.get_num_threads(), len(places), inputs, kept[0].element_size(), 1)
    width, dtype, table = PANEL, kept[0].dtype, None
    if made is not None:
        dtype = getattr(torch, made.dtype)
        width = made.together * PANEL * made.bits // (8 * dtype.itemsize)
        told.together, (told.low, told.high), told.least = made.together, (*made.planes, 0, 0)[:2], least
        table = _codes(made.levels) if made.levels else None
    data = empty(len(places), inputs // told.together, width, dtype=dtype)
    told.rows, told.data = places.ctypes.data, data.data_ptr()
    told.table = None if table is None else ctypes.addressof(table)
    best_build().arrange(told)
    return data


@cache
def _codes(levels: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint8]:
    """Of each byte, the code of the level that it is; of what stands for two, the first one."""
    found = {level % 256: code for code, level in reversed(list(enumerate(levels)))}
    return (ctypes.c_uint8 * 256)(*(found.get(byte, 0) for byte in range(256)))


def joined(
    weights: Sequence[torch.Tensor | Quantized], biases: list[torch.Tensor], form: Form = "none", *, gated: bool = False
) -> Weight:
    """Linear layers that read the same input, as one: behind each other, or a gate and what it opens in pairs.

    Args:
        weights: [outputs, inputs] each.
        biases: [outputs] each; none if they have none.
        form: as `panels`'.
        gated: whether there is a gate and what it opens, one of both if there is one weight.
    """
    columns = PANEL
    if gated:
        columns = PANEL // 2
        if len(weights) == 1:
            weights, biases = halves(weights[0]), [part for bias in biases for part in bias.chunk(2)]
    packed = panels(weights, columns, form)
    if not biases:
        return packed
    return replace(packed, bias=_in_columns(biases, columns))


def _in_columns(biases: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Biases as `Weight` has them."""
    return panels([bias[:, None] for bias in biases], columns, empty=torch.empty).data.float().flatten()


def stacked(
    experts: Sequence[Sequence[torch.Tensor | Quantized]],
    columns: int,
    form: Form = "none",
    biases: Sequence[Sequence[torch.Tensor]] = (),
) -> Weight:
    """The weights of experts, one behind the other; arguments of each as `panels`', biases as `joined`'s."""
    first = panels(experts[0], columns, form, torch.empty)

    def room(of: torch.Tensor) -> torch.Tensor:
        return huge_pages.empty(len(experts), *of.shape, dtype=of.dtype)

    data, scales = room(first.data), None if first.scales is None else first.scales.each(room)
    for i, weights in enumerate(experts):
        packed = panels(weights, columns, form, torch.empty)
        data[i] = packed.data
        if scales is not None and packed.scales is not None:
            scales.each(lambda to, x, i=i: to[i].copy_(x), packed.scales)
    bias = torch.stack([_in_columns(of, columns) for of in biases]) if biases else None
    return replace(first, data=data, scales=scales, bias=bias)


def halves(weight: torch.Tensor | Quantized) -> list[torch.Tensor | Quantized]:
    """A gate and what it opens, of one weight."""
    if isinstance(weight, Quantized):
        return [weight.rows(part) for part in torch.arange(weight.shape[0]).chunk(2)]
    return list(weight.chunk(2))
