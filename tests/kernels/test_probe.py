"""The comparison of bits, and the search for key lengths that agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from detgen.kernels.attention import BLOCK, PERIOD
from detgen.kernels.linear import weight_sample
from detgen.kernels.probe import Product, bits, key_lengths, same_bits

CPU = torch.device("cpu")
ALL = tuple(range(BLOCK, PERIOD + 1, BLOCK))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_bits_of_every_size(dtype: torch.dtype) -> None:
    """Any dtype is seen as integers of its size; a view that is not contiguous, too."""
    x = torch.arange(12).to(dtype).view(3, 4)
    assert bits(x).dtype.itemsize == dtype.itemsize
    assert not bits(x).is_floating_point()
    assert same_bits(x.t(), x.t().contiguous())


def test_same_bits_is_stricter_than_equality() -> None:
    """Signs of zero count, a NaN equals itself; one bit, shape or dtype off is a difference."""
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


Twist = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]


def found(twist: Twist) -> tuple[int, ...]:
    """Key lengths of an attention that is exact but for a factor computed from its queries and keys.

    It returns the queries, so that nothing depends on what a library does on this machine.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, *_: object) -> torch.Tensor:
        return q * twist(q, k)

    return key_lengths(attend, 1, 16, torch.float32, CPU, 4)


ULP = 2.0**-22


def test_an_exact_attention_may_read_every_length() -> None:
    assert found(lambda q, k: 1) == ALL


@pytest.mark.parametrize("broken", ALL[:-1])
def test_a_length_that_breaks_is_found(broken: int) -> None:
    """An implementation whose bits differ at one length loses that length and no other."""
    assert found(lambda q, k: 1 + ULP * (k.shape[1] == broken)) == tuple(n for n in ALL if n != broken)


def test_a_broken_period_leaves_nothing() -> None:
    """If whole periods disagree with longer ones, no length can be trusted."""
    assert found(lambda q, k: 1 + ULP * (k.shape[1] == PERIOD)) == ()


def test_a_dependence_on_the_rows_is_found() -> None:
    """An implementation that gives a tile of few rows other bits than one of many has no class."""
    assert found(lambda q, k: 1 + ULP * (q.shape[2] < 16)) == ()


def test_a_ragged_last_block_of_rows_is_found() -> None:
    """An implementation that treats the rows after the last whole block of 32 otherwise is not trusted with them."""

    def twist(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rows, whole = q.shape[2], q.shape[2] // 32 * 32
        return 1 + ULP * (torch.arange(rows) >= (whole or rows))[:, None]

    assert found(twist) == ()


@pytest.mark.parametrize("place", [0, 5, 31])
def test_a_dependence_on_the_place_is_found(place: int) -> None:
    """An implementation that computes some row of a block of 32 otherwise, whichever query stands there."""
    assert found(lambda q, k: 1 + ULP * (torch.arange(q.shape[2]) % 32 == place)[:, None]) == ()


def test_a_dependence_on_the_threads_is_found() -> None:
    """Also where each number of threads agrees with itself; torch's number stays as it was."""
    torch.set_num_threads(2)
    assert found(lambda q, k: 1 + ULP * torch.get_num_threads()) == ()
    assert found(lambda q, k: 1 + ULP * (torch.get_num_threads() == 1 and k.shape[1] == BLOCK)) == ALL[1:]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("splits", [lambda slots: slots == 1, lambda slots: slots < 16])
def test_a_dependence_on_the_slots_is_found(splits: Callable[[int], bool]) -> None:
    """An implementation that shares a row's keys out where a tile has few slots, as kernels of GPUs do."""
    assert found(lambda q, k: 1 + ULP * splits(q.shape[0])) == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_order_of_a_sum_in_16_bits_is_found(dtype: torch.dtype) -> None:
    """It hides on random rows: few of their outputs are rounded to another number."""
    weight = torch.randn(256, 704, generator=torch.Generator().manual_seed(0)).to(dtype)

    def row(x: torch.Tensor, parts: int) -> torch.Tensor:
        sums = [w.float() @ a.float() for a, w in zip(x.chunk(parts), weight.chunk(parts, 1), strict=True)]
        return torch.stack(sums).sum(0).to(dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row(one, 1 if len(x) < 33 else 2) for one in x])

    tried = Product(product, weight_sample(weight))
    for reference, alike in ((64, (33, 64, 97)), (16, (1, 4, 16, 32))):
        tried.learn(reference)
        assert [n for n in (1, 4, 16, 32, 33, 64, 97) if tried.agrees(n)] == list(alike)
