"""An operator is proved at the row counts, layouts and threads of a run, or found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from detgen.kernels.generic.proving import Laid, Sample, prove

aten: Any = torch.ops.aten


def sample(func: Any, *args: Any, shape: tuple[int, ...], strides: tuple[tuple[int, int], ...], axis: int) -> Sample:
    """Of one argument with rows."""
    like = torch.randn(1000)
    laid = Laid(axis, 1, False, shape, strides, like)
    return Sample(str(func), func, ((like, *args), {}), [laid], [(axis, 1, False)])


def rows_of(width: int, func: Any, *args: Any) -> Sample:
    return sample(func, *args, shape=(5, width), strides=((width, 0), (1, 0)), axis=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_exact_is_proved(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert prove(rows_of(3, aten.neg.default)) is None
        assert prove(rows_of(70, aten.mul.Tensor, 0.3)) is None
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_end_of_a_vector_is_found() -> None:
    """A sigmoid over [rows, 1] ends in scalar code."""
    assert prove(rows_of(1, aten.sigmoid.default))


def test_a_result_that_depends_on_the_rows_is_found() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * (len(x) == 123)

    assert prove(rows_of(4, shifted)) == 123


def test_threads_are_tried() -> None:
    def by_threads(x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * (torch.get_num_threads() - 1)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert prove(rows_of(4, by_threads)) == 1
        fixed = Sample("fixed", by_threads, ((torch.randn(4),), {}), [None], [None])
        assert prove(fixed) == 0
    finally:
        torch.set_num_threads(before)


def test_rows_lie_as_they_do_in_a_pass() -> None:
    """[heads, rows, size] seen as [rows, heads, size]: strides that depend on the rows."""
    seen = set()

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.add((x.shape, x.stride()))
        return x * 2

    assert prove(sample(note, shape=(5, 3, 4), strides=((4, 0), (0, 4), (1, 0)), axis=0)) is None
    assert (torch.Size((512, 3, 4)), (4, 2048, 1)) in seen
    assert (torch.Size((1, 3, 4)), (4, 4, 1)) in seen


def test_axes_that_repeat_their_entries() -> None:
    found = prove(sample(aten.exp.default, shape=(5, 7), strides=((1, 0), (0, 0)), axis=0))
    assert found is None or found > 0
    laid = Laid(0, 1, False, (5, 7), ((1, 0), (0, 0)), torch.randn(9))
    memory, whole = laid.empty(3)
    assert memory.shape == (3, 1)
    assert whole.stride() == (1, 0)


def test_rows_with_several_places() -> None:
    """Side by side, or as far apart as there are rows."""
    for inner in (False, True):
        laid = Laid(0, 2, inner, (10, 3), ((3, 0), (1, 0)), torch.randn(50))
        doubled = Sample("mul", aten.mul.Tensor, ((torch.randn(5), 2.0), {}), [laid], [(0, 2, inner)])
        assert prove(doubled) is None
    assert Laid(0, 2, True, (), (), torch.ones(1)).at(torch.tensor([1, 3]), 5).tolist() == [1, 3, 6, 8]
    assert Laid(0, 2, False, (), (), torch.ones(1)).at(torch.tensor([1, 3]), 5).tolist() == [2, 3, 6, 7]
