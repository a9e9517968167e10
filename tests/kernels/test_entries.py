"""What is stored in the cache is finite: compiled or not, the same bits, and finite values keep theirs."""

from __future__ import annotations

import pytest
import torch

from detgen.kernels import entries
from detgen.kernels.compiled import build
from detgen.kernels.entries import store
from detgen.kernels.finite import bounded, most
from detgen.kernels.probe import same_bits

SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 1e17, 3e18, -3e18, 3e38, -3e38]


def rows(dtype: torch.dtype, *, special: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of seven rows, slices of something larger as a decoder has them."""
    heads = torch.randn(7, 10, 24, generator=torch.Generator().manual_seed(3)) * 10
    if special:
        spread = torch.randperm(heads.numel(), generator=torch.Generator().manual_seed(4))[:600]
        heads.view(-1)[spread] = torch.tensor(SPECIAL).repeat(60)[:600]
    heads = heads.to(dtype)
    return heads[:, 5:8], heads[:, 7:10, :16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [True, False])
def test_stored_in_bounds(dtype: torch.dtype, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = rows(dtype, special=special)
    positions = torch.tensor([3, 0, 9, 4, 11, 1, 8])
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(entries, "store_compiled", lambda *_: None)
        buffers = torch.zeros(12, 3, 24, dtype=dtype), torch.zeros(12, 3, 16, dtype=dtype)
        within = store(*buffers, positions, k, v)
        assert within == (compiled and not special and build() is not None and dtype != torch.float16)
        assert all(x.isfinite().all() and x.abs().max() <= most(dtype) * 1.01 for x in buffers)
        assert all(x[[2, 5, 6, 7, 10]].eq(0).all() for x in buffers)
        found.append(buffers)
    for one, other, given in zip(*found, (k, v), strict=True):
        assert same_bits(one, other)
        assert same_bits(one[positions], bounded(given))
        if not special:
            assert same_bits(one[positions], given.contiguous())
