"""What all kernels rest on, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import triton
import triton.language as tl

from detgen.kernels.triton.launching import above, send, sent, sent_together


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


@pytest.mark.parametrize(("size", "wanted"), [(0, 16), (1, 16), (16, 16), (17, 32), (96, 128)])
def test_sizes_of_blocks(size: int, wanted: int) -> None:
    assert above(size) == wanted


def test_what_is_sent_is_a_copy(device: str) -> None:
    host, there = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64, device=device)
    send(host, there)
    other = sent(host, device)
    host.zero_()
    assert there.tolist() == other.tolist() == [1, 2, 3]


def test_arrays_that_are_sent_together_are_aligned(device: str) -> None:
    """Kernels are compiled for addresses that 16 divides."""
    arrays = np.arange(3), np.arange(15).reshape(5, 3), np.zeros(0, np.int64), np.arange(4)
    found = sent_together(arrays, device)
    for x, there in zip(arrays, found, strict=True):
        assert there.shape == x.shape
        assert there.tolist() == x.tolist()
    first = found[0].data_ptr()
    assert [(there.data_ptr() - first) % 16 for there in found] == [0] * 4
