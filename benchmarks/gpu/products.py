"""Products as something to compare at many row counts: which of them agree bit for bit.

Row counts of one class give a row the same bits at every place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from detgen.kernels.bits import same_bits

# A ladder, with odd ones between its rungs.
ROWS: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 23, 24, 32, 33, 47, 48, 64, 65, 96, 97, 127, 128, 129, 192)
ROWS += (256, 257, 384, 511, 512, 1024, 2048)
_CANCELLING = 16  # rows of a product that are compared
_SAMPLE = 32  # rows of a weight that they are orthogonal to

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shapes_of(settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a Llama, joined and apart, by name."""
    hidden, inner, heads = (settings[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_heads, size = settings["num_key_value_heads"], settings.get("head_dim") or hidden // heads
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * size),
        "o": (heads * size, hidden),
        "gate+up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, settings["vocab_size"]),
        "k": (hidden, kv_heads * size),
        "gate": (hidden, inner),
    }


def random(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A weight of random numbers, scaled so that what it gives is about as large as what it is given."""
    return torch.randn(*shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)


class Product:
    """A product in 16 bits, to be tried at many row counts.

    Rounding to 16 bits hides nearly all differences of a sum's order: on random inputs a few outputs in a hundred
    thousand show one. Inputs that are orthogonal to weight rows make the terms of their sums cancel, so that what is
    left, and what is rounded, is of the size of the terms' own rounding; one output in fifty shows another order.

    Args:
        compute: [rows, in] -> [rows, out], both in the dtype and on the device of `sample`.
        sample: [some, in], rows of the weight.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor) -> None:
        self._compute = compute
        size = sample.shape[1]
        few = sample[: max(size // 4, 1)].double().cpu()
        x = torch.randn(_CANCELLING, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x -= torch.linalg.lstsq(few, few @ x.T, driver="gelsd").solution.T
        self._rows = x.to(sample.device, sample.dtype)

    def learn(self, count: int) -> None:
        """Make the results at a row count the reference for the others."""
        self._want = self._results(count)[:_CANCELLING]

    def agrees(self, count: int) -> bool:
        """Whether the results at a row count are the reference's, at every place."""
        found = self._results(count)
        return same_bits(found, self._want[torch.arange(len(found), device=found.device) % _CANCELLING])

    def _results(self, count: int) -> torch.Tensor:
        """Those of all rows, one after the other, in passes of `count` rows."""
        passes = -(-_CANCELLING // count)
        rows = self._rows[torch.arange(passes * count, device=self._rows.device) % _CANCELLING]
        return torch.cat([self._compute(part) for part in rows.split(count)])


class Classes(NamedTuple):
    """Row counts that agree, and those at which a row's bits depend on its place."""

    agreeing: list[list[int]]
    unlike_themselves: list[int]


def classes(product: Product, counts: Iterable[int]) -> Classes:
    """The classes of row counts of a product."""
    known: list[tuple[Product, list[int]]] = []
    places = []
    for count in counts:
        members = next((members for one, members in known if one.agrees(count)), None)
        if members is None:
            one = copy.copy(product)
            one.learn(count)
            known.append((one, [count]))
            if not one.agrees(count):
                places.append(count)
        else:
            members.append(count)
    return Classes([members for _, members in known], places)


def spans(counts: Sequence[int], ladder: Sequence[int]) -> str:
    """Row counts in words: neighbours on the ladder as first-last."""
    at = [ladder.index(count) for count in counts]
    starts = [i for i in range(len(at)) if not i or at[i] != at[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(at) - 1]
    return " ".join(str(counts[i]) if i == j else f"{counts[i]}-{counts[j]}" for i, j in zip(starts, ends, strict=True))


def in_words(found: Classes, ladder: Sequence[int]) -> str:
    """Classes in words."""
    said = "one class" if len(found.agreeing) == 1 else " | ".join(spans(c, ladder) for c in found.agreeing)
    if found.unlike_themselves:
        said += f"; a row's place matters at {spans(found.unlike_themselves, ladder)}"
    return said


def product_of(linear: Linear, weight: torch.Tensor) -> Product:
    """A linear layer as something to compare at many row counts."""
    return Product(lambda x: linear(x, weight), weight[:: max(len(weight) // _SAMPLE, 1)][:_SAMPLE].clone())


def calls(linear: Linear, x: torch.Tensor, weights: Iterable[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """A call of a linear layer with each of some weights."""
    return [partial(linear, x, weight) for weight in weights]
