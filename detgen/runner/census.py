"""The census: which operators of torch a model's own forward dispatches, and whether each keeps rows apart.

The forward runs a few times at different row counts while each operator is watched (see `labelling`). Functions of the
native library work row by row. Operators that move entries or choose among them, and those that apply one operation of
IEEE 754 to each entry, are row-invariant by construction. Each other operator is proved (see `proving`), or the model
is refused, naming the operator. Nothing here depends on time, or on how busy the machine is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from detgen.kernels.c.call import watching
from detgen.kernels.generic.functions import NativeFunctions
from detgen.kernels.generic.generic_decoder import Census, GenericDecoder, Given
from detgen.kernels.generic.labelling import has_rows
from detgen.kernels.generic.proving import Laid, Sample, prove
from detgen.kernels.generic.watching import Left, RefusedError, Telling, Watched
from detgen.kernels.input_batch import Window, Windows
from detgen.runner.model_runner import ModelRunner

# Passes to watch: one with a single row, which models often treat differently, and two whose row counts have no common
# factor; each window as slot, first position, tokens, rows whose logits are wanted.
_PASSES = (
    ((0, 3, 1, 1),),
    ((1, 20, 2, 1), (0, 4, 3, 2)),
    ((0, 7, 6, 4), (2, 0, 1, 0), (1, 22, 5, 3)),
)
_POSITIONS = 64


def take_census(decoder: GenericDecoder, runner: ModelRunner, vocabulary: int) -> Census:
    """Watch a model's passes; if operators remain to be proved, first replace the functions that they come from.

    Args:
        decoder: decoder whose modules were replaced.
        runner: its passes; the cache is cleared.
        vocabulary: number of token ids that it reads.
    """
    try:
        if not _samples(decoder, runner, vocabulary):
            return Census((), "")
    except RefusedError:
        pass  # the operator may be replaced below
    decoder.functions = NativeFunctions()
    try:
        samples = _samples(decoder, runner, vocabulary)
        for sample in samples:
            _prove(sample)
    except RefusedError as error:
        return Census((), str(error))
    return Census(tuple(sorted({sample.name for sample in samples})), "")


def _prove(sample: Sample) -> None:
    rows = prove(sample)
    if rows is not None:
        among = f"a row other bits beside others, in passes of {rows} rows" if rows else "other bits by more threads"
        raise RefusedError(f"{sample.name} gives {among}")


@torch.no_grad()
def _samples(decoder: GenericDecoder, runner: ModelRunner, vocabulary: int) -> list[Sample]:
    """Return the operators that must be proved.

    Raises:
        RefusedError: if rows are mixed, or the forward takes another course at other row counts.
    """
    pages = runner.cache.pages
    pages.lay_out(3, _POSITIONS)
    random = torch.Generator().manual_seed(5)
    passes: list[Watched] = []
    for i, spans in enumerate((_PASSES[0], *_PASSES)):
        windows = [
            Window(slot, start, torch.randint(vocabulary, (count,), generator=random).tolist(), wanted)
            for slot, start, count, wanted in spans
        ]
        batch = runner.pack(Windows.of(windows))
        if not i:  # what is made only once is made before anything is watched
            decoder.run(batch)
            continue
        given = Given.of(batch)
        watched = Watched(given, passes[0].seen if passes else None)
        with watching(watched.called), Telling(watched.told), watched:
            out = decoder.forward(batch, given)
        watched.check(out, given.wanted)
        passes.append(watched)
    _, few, many = passes
    if len(few.left) != len(many.left):
        raise RefusedError(f"{(few.left + many.left)[-1].name} does not treat all rows alike")
    samples: dict[object, Sample] = {}
    for a, b in zip(few.left, many.left, strict=True):
        sample = _sample(a, b)
        samples.setdefault(sample.key, sample)
    return list(samples.values())


class _Rows(NamedTuple):
    """Where a tensor has its rows; `axis`, `each` and `inner` as in `Laid`.

    Attributes:
        number: number of rows.
        before: number of rows in the other pass.
    """

    axis: int
    each: int
    inner: bool
    number: int
    before: int

    def laid(self, shape: tuple[int, ...], strides: tuple[int, ...], before: tuple[int, ...], x: torch.Tensor) -> Laid:
        """Return the tensor's layout in memory, from its strides in two passes."""
        linear = []
        for s, t, n in zip(strides, before, shape, strict=True):
            slope = 0 if n == 1 else (s - t) // (self.number - self.before)
            linear.append((s - slope * self.number, slope))
        return Laid(self.axis, self.each, self.inner, shape, tuple(linear), x)


def _sample(a: Left, b: Left) -> Sample:
    """Return an operator, as two passes called it, in a form that can be tried at any row count.

    Raises:
        RefusedError: if the layout of its rows is unknown.
    """
    tensors = [x for x in tree_flatten(b.args)[0] if isinstance(x, torch.Tensor)]
    found = [_rows_of(b.name, own, other) for own, other in zip(b.labels, a.labels, strict=True)]
    numbers = next(((one.number, one.before) for one in found if one is not None), None)
    laid = []
    for x, own, (shape, strides), (shape_before, strides_before) in zip(
        tensors, found, b.shapes, a.shapes, strict=True
    ):
        if own is None and numbers is not None and shape != shape_before:  # a constant with an entry per row
            own = _constant(b.name, shape, shape_before, *numbers)
        laid.append(None if own is None else own.laid(shape, strides, strides_before, x))
    out = [_rows_of(b.name, one, other) for one, other in zip(b.out, a.out, strict=True)]
    return Sample(b.name, b.func, b.args, laid, [one and (one.axis, one.each, one.inner) for one in out])


def _constant(name: str, shape: tuple[int, ...], shape_before: tuple[int, ...], number: int, before: int) -> _Rows:
    axes = [i for i, (n, m) in enumerate(zip(shape, shape_before, strict=True)) if n != m]
    if len(axes) != 1 or shape[axes[0]] % number or shape[axes[0]] // number * before != shape_before[axes[0]]:
        raise RefusedError(f"{name} mixes rows")
    return _Rows(axes[0], shape[axes[0]] // number, False, number, before)


def _rows_of(name: str, labels: torch.Tensor | None, before: torch.Tensor | None) -> _Rows | None:
    """Return where a tensor has its rows, from its labels in two passes; None if it has none."""
    if labels is None or before is None or not has_rows(labels):
        return None
    axes = [i for i, (n, m) in enumerate(zip(labels.shape, before.shape, strict=True)) if n != m]
    if len(axes) == 1:
        axis = axes[0]
        table = labels.movedim(axis, 0).flatten(1)
        first: list[int] = table[:, 0].tolist()
        rows = torch.tensor(list(dict.fromkeys(first)), dtype=labels.dtype)
        each = len(first) // len(rows)
        for inner, order in ((False, rows.repeat_interleave(each)), (True, rows.repeat(each))):
            if len(order) == len(first) and bool((table == order[:, None]).all()):
                return _Rows(axis, each, inner, len(rows), before.shape[axis] // each)
    raise RefusedError(f"{name} mixes rows")
