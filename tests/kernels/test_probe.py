"""The comparison of bits, and the search for key lengths that agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from detgen.kernels.attention import BLOCK, PERIOD, AttentionTraits, attend_blocks, attend_fused
from detgen.kernels.probe import bits, key_lengths, same_bits

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


def test_blocks_agree_at_every_length() -> None:
    """The reference implementation has one class: all key lengths."""
    assert key_lengths(attend_blocks, 2, 32, torch.float32, CPU, 4) == ALL


def test_fused_has_the_period() -> None:
    """The fused kernel agrees with itself at whole periods at least, and is never better than all."""
    found = key_lengths(attend_fused, 2, 64, torch.float32, CPU, 4)
    assert PERIOD in found
    assert set(found) <= set(ALL)


@pytest.mark.parametrize("broken", ALL[:-1])
def test_a_length_that_breaks_is_found(broken: int) -> None:
    """An implementation whose bits differ at one length loses that length and no other."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        out = attend_blocks(q, k, v, mask, traits)
        return torch.where(torch.tensor(k.shape[1] == broken), out * (1 + 2**-22), out)

    assert key_lengths(attend, 1, 16, torch.float32, CPU, 4) == tuple(n for n in ALL if n != broken)


def test_a_broken_period_leaves_nothing() -> None:
    """If whole periods disagree with longer ones, no length can be trusted."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        out = attend_blocks(q, k, v, mask, traits)
        return torch.where(torch.tensor(k.shape[1] == PERIOD), out + 1e-3, out)

    assert key_lengths(attend, 1, 16, torch.float32, CPU, 4) == ()


def test_a_dependence_on_the_rows_is_found() -> None:
    """An implementation that gives a tile of few rows other bits than one of many has no class."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        return attend_blocks(q, k, v, mask, traits) + 1e-3 * (q.shape[2] < 16)

    assert key_lengths(attend, 1, 16, torch.float32, CPU, 4) == ()


def test_a_ragged_last_block_of_rows_is_found() -> None:
    """An implementation that treats the rows behind the last whole block of 32 otherwise is not trusted with them."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        out = attend_blocks(q, k, v, mask, traits)
        whole = q.shape[2] // 32 * 32
        if whole and q.shape[2] > whole:
            out[:, :, whole:] *= 1 + 2**-22
        return out

    assert key_lengths(attend, 1, 16, torch.float32, CPU, 4) == ()


@pytest.mark.parametrize("splits", [lambda slots: slots == 1, lambda slots: slots < 16])
def test_a_dependence_on_the_slots_is_found(splits: Callable[[int], bool]) -> None:
    """An implementation that shares a row's keys out where a tile has few slots, as kernels of GPUs do."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        return attend_blocks(q, k, v, mask, traits) * (1 + 2**-22 * splits(q.shape[0]))

    assert key_lengths(attend, 1, 16, torch.float32, CPU, 4) == ()
