"""Weights of linear layers as back ends read them: in panels of 32 columns, as they are or in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from detgen.kernels.c import huge_pages
from detgen.kernels.c.quantizing import MADE, STORAGE, Empty, Form, Quantized, alike, cat, fits, quantize
from detgen.program.operands import PANEL, Weight
from detgen.program.storage import FORMATS, Storage, pack

_BLOCK = 1 << 18  # entries that are rearranged at a time


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
    if columns == PANEL:
        found = [cat(found)]
    one = found[0]
    (outputs, inputs), count = one.shape, -(-one.shape[0] // columns)
    if isinstance(one, Quantized):
        storage, codes = one.storage, one.codes
    else:
        storage, codes = STORAGE[one.dtype], None
        if form == "pairs" and one.dtype == torch.bfloat16 and inputs % 2 == 0:
            storage = Storage.PAIR
    made = FORMATS[storage]
    dtype: torch.dtype = getattr(torch, made.dtype)
    width = made.together * PANEL * made.bits // (8 * dtype.itemsize)
    data = empty(count, inputs // made.together, width, dtype=dtype)
    scales = None
    step = max(_BLOCK // (PANEL * inputs), 1)
    for first in range(0, count, step):
        rows = slice(first * columns, min((first + step) * columns, outputs))
        parts = [w.rows(rows) if isinstance(w, Quantized) else w[rows] for w in found]
        if storage < Storage.BYTE:
            plain = _arranged([p for p in parts if isinstance(p, torch.Tensor)], columns)
            data[first : first + step] = pack(storage, plain) if storage == Storage.PAIR else plain
            continue
        few = [part for part in parts if isinstance(part, Quantized)]
        some = few[0].scales.each(lambda *x: _arranged(list(x), columns), *(part.scales for part in few[1:]))
        scales = scales or some.each(lambda x: empty(count, *x.shape[1:], dtype=x.dtype))
        scales.each(lambda to, x, first=first: to[first : first + step].copy_(x), some)
        least = made.least if scales.minima is None else 0
        data[first : first + step] = pack(storage, _arranged([part.whole for part in few], columns), least)
    return Weight(
        data=data,
        scales=scales,
        codes=codes,
        outputs=outputs,
        columns=count * PANEL,
        inputs=inputs,
        storage=storage,
    )


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


def _arranged(weights: list[torch.Tensor], columns: int) -> torch.Tensor:
    """Rows of as many weights as a panel has parts, [panels, inputs, PANEL]."""
    padded = [_padded(w, -(-w.shape[0] // columns) * columns) for w in weights]
    parts = [w.reshape(-1, columns, w.shape[1]) for w in padded]
    return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).transpose(1, 2)


def _padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - weight.shape[0]
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight
