"""Traces what torch's operators do to rows: each entry of a tensor has a label, the row that it belongs to.

An operator that moves entries moves their labels, too. One that computes an entry from several must find the same label
on all of them. So the axis of the rows is never guessed, and a mixture of rows is found by the kind of operator, not by
its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from detgen.kernels.generic import operators as ops

NONE = -1  # label of an entry without a row: of a weight or a constant


def has_rows(labels: torch.Tensor) -> bool:
    """Return whether any entry belongs to a row, or to several."""
    return bool((labels != NONE).any())


class Labels:
    """The labels of a pass's tensors; -2 and below mark entries of several rows, by the operator that mixed them."""

    def __init__(self) -> None:
        self._mixers: list[str] = []
        self._known: dict[int, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the id of a known one

    def know(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        """Set a tensor's labels, int32 of its shape."""
        self._held.append(x)
        self._known[id(x)] = labels

    def known(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's labels; None if it existed before the pass."""
        return self._known.get(id(x))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor's labels, of any tensor."""
        found = self._known.get(id(x))
        # Without allocating memory for the labels of weights.
        return torch.full((), NONE, dtype=torch.int32).expand(x.shape) if found is None else found

    def mixer(self, labels: torch.Tensor) -> str | None:
        """Return the operator that mixed rows, given labels; None if each entry belongs to one row."""
        least = int(labels.min()) if labels.numel() else NONE
        return self._mixers[NONE - 1 - least] if least < NONE else None

    def mixed(self, name: str) -> int:
        """Return the label of entries that an operator mixed."""
        if name not in self._mixers:
            self._mixers.append(name)
        return NONE - 1 - self._mixers.index(name)

    def combined(self, labels: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Combine labels of entries at the same place, by broadcasting."""
        found, *others = labels
        for other in others:
            a, b = torch.broadcast_tensors(found, other)
            either = torch.where(a == NONE, b, torch.where((b == NONE) | (a == b), a, torch.minimum(a, b)))
            clash = (a != b) & (a > NONE) & (b > NONE)
            found = torch.where(clash, self.mixed(name), either) if bool(clash.any()) else either
        return found

    def along(self, labels: torch.Tensor, dims: Sequence[int], name: str) -> torch.Tensor:
        """Combine labels along some axes, which are then of size 1."""
        if not labels.ndim or not dims:
            return labels
        if not labels.numel():
            gone = [d % labels.ndim for d in dims]
            return labels.new_full([1 if i in gone else n for i, n in enumerate(labels.shape)], NONE)
        most = labels.amax(tuple(dims), keepdim=True)
        least = torch.where(labels == NONE, most, labels).amin(tuple(dims), keepdim=True)
        single = torch.where(least < NONE, least, self.mixed(name)) if bool((least != most).any()) else most
        return torch.where(least == most, most, single)

    def found(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: list[torch.Tensor], *, strange: bool
    ) -> list[torch.Tensor]:
        """Return the labels of an operator's results.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its named arguments.
            out: its results.
            strange: whether numeric arguments, or results without tensor arguments, depend on the number of rows.
        """
        name, base, named = str(func), ops.base_name(func), ops.bound(func, args, kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if base in ops.CONSTANTS or not tensors or (strange and base not in ops.MOVES):
            return self._alike(out, self.mixed(name) if strange else NONE)
        if base == "copy":
            return [self.of(named["src"]).expand(named["self"].shape)]
        if base in ops.MOVES:
            return self._moved(func, base, args, kwargs)
        if base in ops.READS:
            return [self._read(name, base, func, named).clone()]
        if base in ops.PAIRS:
            labels = self.of(tensors[0])
            joined = out[0].is_complex()
            return [self.along(labels, [-1], name)[..., 0] if joined else labels[..., None].repeat_interleave(2, -1)]
        if ops.is_elementwise(func):
            labels = self.combined([self.of(x) for x in tensors], name)
            return [labels.expand(x.shape).clone() for x in out]
        if base in ops.ALONG:
            return self._along(name, named, tensors, out)
        if base in ops.PRODUCTS:
            return [self._product(name, base, named).clone()]
        if base == "scatter":
            return [self._scattered(name, named).clone()]
        return self._alike(out, self.mixed(name) if any(has_rows(self.of(x)) for x in tensors) else NONE)

    def _alike(self, out: list[torch.Tensor], label: int) -> list[torch.Tensor]:
        return [torch.full(x.shape, label, dtype=torch.int32) for x in out]

    def _moved(self, func: Any, base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Apply the operator itself to the labels."""
        kwargs = {n: v for n, v in kwargs.items() if n not in ("dtype", "layout", "device", "pin_memory")}
        args, kwargs = tree_map(lambda x: self.of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        if base == "_to_copy":
            return [args[0].clone()]
        if base == "constant_pad_nd":
            args = (*args[:2], NONE)
        return [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]

    def _read(self, name: str, base: str, func: Any, named: dict[str, Any]) -> torch.Tensor:
        """Return labels that combine those of the entries read with those of the indices."""
        if base == "embedding":
            labels = self.of(named["indices"])[..., None]
            return labels.expand(*labels.shape[:-1], named["weight"].shape[1])
        source = self.of(named["self"])
        if base == "index":
            return self._indexed(name, source, named["indices"], func)
        dim = int(named["dim"])
        if base == "index_select":
            shape = [1] * source.ndim
            shape[dim] = -1
            return self.combined(
                [source.index_select(dim, named["index"]), self.of(named["index"]).reshape(shape)], name
            )
        index = named["index"] if base == "gather" else named["indices"]
        return self.combined([source.gather(dim, index), self.of(index)], name)

    def _indexed(
        self, name: str, source: torch.Tensor, indices: Sequence[torch.Tensor | None], func: Any
    ) -> torch.Tensor:
        given = [(i, x) for i, x in enumerate(indices) if x is not None]
        axes = [i for i, _ in given]
        picked = self.combined([self.of(x) for _, x in given], name)
        if any(x.dtype == torch.bool for _, x in given) or axes != list(range(axes[0], axes[-1] + 1)):
            picked = torch.full((), self.mixed(name) if has_rows(picked) else NONE, dtype=torch.int32)
        else:
            picked = picked.reshape(*picked.shape, *[1] * (source.ndim - axes[-1] - 1))
        return self.combined([func(source, indices), picked], name)

    def _along(
        self, name: str, named: dict[str, Any], tensors: list[torch.Tensor], out: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        x, labels, given = tensors[0], self.of(tensors[0]), named.get("dim")
        if "normalized_shape" in named:
            labels = self.combined([labels, *(self.of(t) for t in tensors[1:])], name)
            given = range(x.ndim - len(named["normalized_shape"]), x.ndim)
        dims = [given] if isinstance(given, int) else list(range(x.ndim) if given is None else given or range(x.ndim))
        kept = dropped = self.along(labels, dims, name)
        for d in sorted((d % x.ndim for d in dims), reverse=True) if x.ndim else ():
            dropped = dropped.squeeze(d)
        return [(kept if y.ndim == x.ndim else dropped).expand(y.shape).clone() for y in out]

    def _product(self, name: str, base: str, named: dict[str, Any]) -> torch.Tensor:
        """Combine the labels of a row of one matrix and a column of the other."""
        names = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2")}
        a, b = (self.of(named[n]) for n in names.get(base, ("batch1", "batch2")))
        parts = [self.along(a, [-1], name), self.along(b, [-2], name)]
        return self.combined(parts + ([self.of(named["self"])] if base in ("addmm", "baddbmm") else []), name)

    def _scattered(self, name: str, named: dict[str, Any]) -> torch.Tensor:
        """Return labels of a tensor some of whose entries are replaced along an axis."""
        target, dim = self.of(named["self"]), int(named["dim"])
        parts = [self.of(x) for x in (named["index"], named.get("src")) if isinstance(x, torch.Tensor)]
        merged = self.along(self.combined(parts, name), [dim], name)
        if merged.shape != target.narrow(dim, 0, 1).shape:
            return torch.full(target.shape, self.mixed(name), dtype=torch.int32)
        return self.combined([target, merged], name)
