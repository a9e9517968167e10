"""Exponential, logarithm and shares in Triton have the bits of their references."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import triton
import triton.language as tl

from detgen.kernels.filters import shares
from detgen.kernels.triton.float_functions import exponential, fold, logarithm, share
from detgen.kernels.triton.launching import OPTIONS
from detgen.program import arithmetic, fdlibm

SIZE = 4096


@triton.jit
def _apply(x, out, WHICH: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    if WHICH == 0:
        tl.store(out + at, exponential(value))
    elif WHICH == 1:
        tl.store(out + at, logarithm(value))
    else:
        tl.store(out + at, share(value))


@triton.jit
def _fold(x, out, ROWS: tl.constexpr):  # noqa: N803
    at = tl.arange(0, ROWS)
    tl.store(out + at, fold(tl.load(x + 16 * at[:, None] + tl.arange(0, 16)[None, :]), ROWS))


def apply(which: int, x: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    out = torch.empty(SIZE, dtype=dtype, device=device)
    _apply[(1,)](x.to(device), out, which, SIZE, **OPTIONS)
    return out.cpu()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 30.0, 120.0])
def test_exponential(device: str, scale: float) -> None:
    x = -scale * torch.rand(SIZE, generator=torch.Generator().manual_seed(0))
    x[:8] = torch.tensor([0.0, -0.0, -87.0, -87.00001, -86.99999, -math.inf, -1e-45, -3e38])
    found, wanted = apply(0, x, torch.float32, device), arithmetic.exponential(x)
    assert found.view(torch.int32).equal(wanted.view(torch.int32))


@pytest.mark.parametrize("scale", [1e-300, 1e-10, 1.0, 1e10, 1e300])
def test_logarithm(device: str, scale: float) -> None:
    """Constants of float64 that were rounded to float32 on the way would show."""
    x = scale * torch.rand(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e-307
    x[:5] = torch.tensor([1.0, 1 - 2.0**-53, 2.0**-54, 0.5**0.5, 2.0**0.5], dtype=torch.float64)
    found = apply(1, x, torch.float64, device).numpy()
    assert found.tobytes() == fdlibm.logarithm(x.numpy()).tobytes()


@pytest.mark.parametrize("scale", [1e-12, 0.3, 1.0, 8.0, 60.0])
def test_shares(device: str, scale: float) -> None:
    x = -scale * torch.rand(SIZE, generator=torch.Generator().manual_seed(0))
    x[:5] = torch.tensor([0.0, -0.0, -40.0, -3e38, -math.inf])
    found = apply(2, x, torch.int64, device).numpy()
    assert found.tobytes() == shares(x.numpy(), x.numpy()[0], 1.0).tobytes()


def test_fold(device: str) -> None:
    """In the order of the reference, which another order would not give."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-6, 6, 16)
    out = torch.empty(32, device=device)
    _fold[(1,)](x.to(device), out, 32, **OPTIONS)
    assert out.cpu().equal(arithmetic.fold(x))
    assert not out.cpu().equal(x.sum(1))
