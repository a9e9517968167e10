"""Proves an operator: its rows have the same bits in any number of rows as alone, with any number of threads.

Promise: the operator was run at every row count up to MOST, with memory laid out as in a model's passes, and compared
in bits with each row computed alone, by one thread and by as many as the run has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from detgen.program.arrays import same_bits

MOST = 512  # rows of a pass


@dataclass(frozen=True, slots=True)
class Laid:
    """The layout of an argument's rows.

    Attributes:
        axis: the axis of the rows.
        each: entries of a row along that axis.
        inner: whether a row's entries are as far apart as there are rows, instead of side by side.
        shape: the argument's size in some pass.
        strides: (a, b) per axis, for a stride of a + b * rows.
        like: the argument in that pass.
    """

    axis: int
    each: int
    inner: bool
    shape: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]
    like: torch.Tensor

    def empty(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for `rows` rows, with size 1 on axes that repeat entries, and the whole argument on it."""
        sizes = [rows * self.each if i == self.axis else n for i, n in enumerate(self.shape)]
        strides = [a + b * rows for a, b in self.strides]
        held = [1 if s == 0 else n for n, s in zip(sizes, strides, strict=True)]
        last = sum((n - 1) * s for n, s in zip(held, strides, strict=True))
        memory = torch.zeros(last + 1, dtype=self.like.dtype).as_strided(held, strides)
        return memory, memory.expand(sizes)

    def at(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the indices on the axis of some rows among `count`, in the order that so many rows would have."""
        return places(rows, self.each, count, inner=self.inner)


def places(rows: torch.Tensor, each: int, count: int, *, inner: bool) -> torch.Tensor:
    """See `Laid.at`."""
    along = torch.arange(each)
    if inner:
        return (along[:, None] * count + rows).flatten()
    return (rows[:, None] * each + along).flatten()


@dataclass(frozen=True, slots=True)
class Sample:
    """An operator and the arguments of a call.

    Attributes:
        name: its name.
        func: the operator.
        args: (args, kwargs).
        laid: the layout of each tensor argument; None for one without rows.
        out: for each result, the axis of its rows, `each` and `inner`, as in `Laid`; None for one without rows.
    """

    name: str
    func: Callable[..., Any]
    args: Any
    laid: list[Laid | None]
    out: list[tuple[int, int, bool] | None]

    @property
    def key(self) -> object:
        """A key that is equal for samples that one proof covers."""
        rest = [
            repr(x) if not isinstance(x, torch.Tensor) else (x.dtype, None if laid is None else laid.strides)
            for x, laid in self._leaves()
        ]
        shapes = [
            None if laid is None else tuple(n for i, n in enumerate(laid.shape) if i != laid.axis) for laid in self.laid
        ]
        fixed = [id(x) for x, laid in self._leaves() if isinstance(x, torch.Tensor) and laid is None]
        return self.name, tuple(
            map(repr, (rest, shapes, [one and (one.axis, one.each, one.inner) for one in self.laid], fixed))
        )

    def _leaves(self) -> list[tuple[Any, Laid | None]]:
        laid = iter(self.laid)
        return [(x, next(laid) if isinstance(x, torch.Tensor) else None) for x in tree_flatten(self.args)[0]]

    def run(self, made: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Run the operator with these arguments with rows; return its results."""
        leaves, spec = tree_flatten(self.args)
        given = iter(made)
        found = [x if not isinstance(x, torch.Tensor) else (x if (one := next(given)) is None else one) for x in leaves]
        args, kwargs = tree_unflatten(found, spec)
        result = self.func(*args, **kwargs)
        return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]


@torch.no_grad()
def prove(sample: Sample) -> int | None:
    """Return the least row count at which a row differs from itself alone; 0 if threads change bits, None if none.

    Args:
        sample: the operator; numbers are drawn from those of its arguments.
    """
    threads = torch.get_num_threads()
    counts = sorted({1, threads})
    try:
        torch.set_num_threads(1)
        if not any(sample.laid):
            want = sample.run([None] * len(sample.laid))
            for count in counts:
                torch.set_num_threads(count)
                if not all(map(same_bits, sample.run([None] * len(sample.laid)), want)):
                    return 0
            return None
        drawn = [None if laid is None else _drawn(laid) for laid in sample.laid]
        alone = [_computed(sample, drawn, torch.tensor([row])) for row in range(MOST)]
        for count in counts:
            torch.set_num_threads(count)
            for rows in range(1, MOST + 1):
                order = (torch.arange(rows) + 37 * rows) % MOST
                if not _agrees(sample, _computed(sample, drawn, order), [alone[i] for i in order.tolist()]):
                    return rows
    finally:
        torch.set_num_threads(threads)
    return None


def _drawn(laid: Laid) -> torch.Tensor:
    """Draw numbers for MOST rows, similar to those of the argument."""
    memory, _ = laid.empty(MOST)
    g = torch.Generator().manual_seed(memory.numel())
    pool = laid.like.flatten()
    found = pool[torch.randint(len(pool), (memory.numel(),), generator=g)]
    if found.is_floating_point():
        found = found * (1 + 0.25 * torch.rand(found.shape, generator=g))
    return memory.copy_(found.view(memory.shape))


def _computed(sample: Sample, drawn: list[torch.Tensor | None], rows: torch.Tensor) -> list[torch.Tensor]:
    made: list[torch.Tensor | None] = []
    for laid, numbers in zip(sample.laid, drawn, strict=True):
        if laid is None or numbers is None:
            made.append(None)
            continue
        memory, whole = laid.empty(len(rows))
        memory.copy_(numbers.index_select(laid.axis, laid.at(rows, MOST)))
        made.append(whole)
    return sample.run(made)


def _agrees(sample: Sample, found: list[torch.Tensor], alone: list[list[torch.Tensor]]) -> bool:
    for i, out in enumerate(sample.out):
        if out is None:
            continue
        axis, each, inner = out
        parts = [one[i] for one in alone]
        if inner:
            want = torch.stack([p.unflatten(axis, (each, 1)) for p in parts], axis + 2).flatten(axis, axis + 2)
        else:
            want = torch.cat(parts, axis)
        if not same_bits(found[i].contiguous(), want.contiguous()):
            return False
    return True
