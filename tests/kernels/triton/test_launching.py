"""What all kernels rest on, in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import triton
import triton.language as tl

from detgen.kernels.triton.launching import INTERPRETED, above, product


@triton.jit
def _multiply(a, b, out, INTERPRETED: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 16)
    both = at[:, None] * 16 + at[None, :]
    zeros = tl.zeros((16, 16), tl.float32)
    tl.store(out + both, product(tl.load(a + both), tl.load(b + both), zeros, INTERPRETED))


def test_products(device: str, dtype: torch.dtype) -> None:
    """bfloat16 among them, which the interpreter would multiply as if it were made of integers."""
    assert (device == "cpu") == INTERPRETED
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.empty(16, 16, device=device)
    _multiply[(1,)](a, b, out, INTERPRETED)
    assert torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@triton.jit
def _fuse(a, b, c, out):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


def test_a_fused_product_is_rounded_once(device: str) -> None:
    """1 + 2^-24 + 2^-80: rounded to float32 it is above 1, but not so if either float32 or float64 rounds it before."""
    a, b, c = (torch.full((16,), x, device=device) for x in (24929 / 4096, 673 / 4096, 2.0**-80))
    out = torch.empty(16, device=device)
    _fuse[(1,)](a, b, c, out)
    assert out.tolist() == [1 + 2.0**-23] * 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on a GPU")
def test_the_interpreter_still_needs_that() -> None:
    """Where this fails, it multiplies bfloat16, and kernels need not care."""
    a = torch.full((16, 16), 1.5, dtype=torch.bfloat16)
    out = torch.empty(16, 16)
    _multiply[(1,)](a, a, out, False)
    assert not torch.allclose(out, torch.full((16, 16), 36.0))


@pytest.mark.parametrize(("size", "wanted"), [(0, 16), (1, 16), (16, 16), (17, 32), (96, 128)])
def test_sizes_of_blocks(size: int, wanted: int) -> None:
    assert above(size) == wanted
