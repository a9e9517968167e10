"""Watches a pass operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from detgen.kernels.generic import operators as ops
from detgen.kernels.generic.generic_decoder import Given
from detgen.kernels.generic.labelling import NONE, Labels, has_rows
from detgen.program.rows import Rows

_NATIVE = "a native layer"


class RefusedError(Exception):
    """Something leaves the rows' bits to chance; the message is a clause."""


@dataclass(frozen=True, slots=True)
class Left:
    """An operator that must be proved, as a pass called it.

    Attributes:
        name: its name.
        func: the operator.
        args: (args, kwargs).
        labels: of the tensors among them; None for those from before the pass.
        shapes: sizes and strides of these.
        out: labels of the results.
    """

    name: str
    func: Any
    args: Any
    labels: list[torch.Tensor | None]
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    out: list[torch.Tensor]


class Telling(TorchFunctionMode):
    """Finds what brings numbers from tensors to Python without an operator, and calls `told` with it."""

    def __init__(self, told: Callable[[str, list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            self._told(func.__name__, [args[0]])
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Follows the labels of a pass.

    Args:
        given: the part of the pass that the forward gets.
        before: what was seen in another pass; None for the first one.

    Attributes:
        seen: of each operator that computes its name, its results' shapes and its numbers.
        left: operators that must be proved.
    """

    def __init__(self, given: Given, before: list[tuple[str, object, object]] | None) -> None:
        super().__init__()
        self.seen: list[tuple[str, object, object]] = []
        self.left: list[Left] = []
        self._before = before
        self._labels = Labels()
        along = torch.arange(len(given.ids), dtype=torch.int32)
        for x, labels in ((given.ids, along), (given.positions, along), (given.wanted, along[given.wanted])):
            self._labels.know(x, labels)

    def called(self, reads: list[torch.Tensor], writes: list[torch.Tensor], of: Rows | None) -> None:
        """Handle a call of the native library, which computes each row from the same row of its inputs."""
        known = self._labels
        with _disable_current_modes():
            labels = known.combined([known.along(known.of(x), [1], _NATIVE) for x in reads], _NATIVE)
            if of is not None:
                self._refuse_mixed(labels)
                if not torch.equal(labels[:, 0], torch.arange(len(labels), dtype=torch.int32)):
                    raise RefusedError("rows come to its attention in another order")
            for x in writes:
                known.know(x, labels.expand(x.shape).clone())

    def told(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Refuse to bring numbers of rows from tensors to Python."""
        if any(has_rows(self._labels.of(x)) for x in tensors):
            raise RefusedError(f"{name} tells what rows hold, and what is computed may depend on it")

    def check(self, logits: torch.Tensor, wanted: torch.Tensor) -> None:
        """Refuse logits whose rows depend on anything but the row wanted there."""
        labels = self._labels.of(logits)
        self._refuse_mixed(labels)
        if len(labels) != len(wanted) or not bool((labels == wanted[:, None]).all()):
            raise RefusedError("its logits are of other rows than those that are wanted")

    def _refuse_mixed(self, labels: torch.Tensor) -> None:
        if (mixer := self._labels.mixer(labels)) is not None:
            raise RefusedError(f"{mixer} mixes rows")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, known = str(func), self._labels
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if ops.base_name(func) in ops.TELLING:
            self.told(name, tensors)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RefusedError(f"{name} is random")
        named, labels = ops.bound(func, args, kwargs), [known.known(x) for x in tensors]
        shapes = [(tuple(x.shape), tuple(x.stride())) for x in tensors]
        kept = args, kwargs
        target = named.get(ops.written(func) or "")
        if isinstance(target, torch.Tensor):  # is changed: what it was is kept
            if known.known(target) is None:
                raise RefusedError(f"{name} changes what outlives a pass")
            kept = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, kept)
            labels = [None if x is None else x.clone() for x in labels]
        result = func(*args, **kwargs)
        out = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        strange = self._strange(name, func, named, out, alone=not tensors)
        try:
            found = known.found(func, args, kwargs, out, strange=strange)
            if isinstance(target, torch.Tensor):
                own = known.of(target)
                own.copy_(found[0].expand(target.shape))
                found = [own]
        except (RuntimeError, IndexError, TypeError, KeyError) as error:
            raise RefusedError(f"what {name} does to rows is not known") from error
        views = any(a.alias_info is not None for a in func._schema.arguments)
        if not (views and tensors and all(x is None for x in labels)):  # views of weights are weights
            for x, one in zip(out, found, strict=True):
                known.know(x, one)
        if not ops.is_exact(func, named, [*tensors, *out]) and not any(bool((one < NONE).any()) for one in found):
            self.left.append(Left(name, func, kept, labels, shapes, found))
        return result

    def _strange(self, name: str, func: Any, named: dict[str, Any], out: list[torch.Tensor], *, alone: bool) -> bool:
        """Return whether an operator takes other numbers than in the other pass, or makes other sizes of nothing.

        Raises:
            RefusedError: if the other pass did not call it.
        """
        base = ops.base_name(func)
        if base in ops.MOVES:
            return False  # which of these are needed depends on how tensors lie in memory
        numbers = {n: v for n, v in named.items() if isinstance(v, int | float | bool | str)}
        made = str(named["self"]) if base.startswith("lift_fresh") else ""
        at, seen = len(self.seen), (name, [x.shape for x in out], (sorted(numbers.items()), made))
        self.seen.append(seen)
        if self._before is None:
            return False
        if at >= len(self._before) or self._before[at][0] != name:
            raise RefusedError(f"{name} is not called in passes of all sizes")
        _, sizes, others = self._before[at]
        return others != seen[2] or (alone and base not in ops.CONSTANTS and sizes != seen[1])
