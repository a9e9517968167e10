"""Norm, gate and rotation against float64, and the same bits for a row wherever it stands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels.triton.gate import ACTIVATIONS, gate, gate_reference
from detgen.kernels.triton.norm import norm, norm_reference
from detgen.kernels.triton.rotate import HeadNorms, rotate, rotate_reference
from detgen.program.steps import Activation

ROUNDED = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def near(
    found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, times: float, of: torch.Tensor | None = None
) -> bool:
    """Whether each entry differs by at most so many roundings, of the entry or of a number that it is a difference of.

    The interpreter rounds to bfloat16 towards 0.
    """
    wanted = wanted.double()
    least = (wanted if of is None else of).abs().clamp_min(torch.finfo(dtype).tiny * 1e3)
    return bool(((found.double() - wanted).abs() <= times * ROUNDED[dtype] * least).all())


@examples(12)
@given(rows=st.integers(1, 5), size=st.sampled_from([1, 31, 64, 100, 576]), adds=st.booleans(), seed=st.integers(0, 99))
def test_norm(device: str, dtype: torch.dtype, rows: int, size: int, adds: bool, seed: int) -> None:
    maker = torch.Generator().manual_seed(seed)
    x, more = (torch.randn(rows, size, generator=maker).to(device, dtype) for _ in range(2))
    weight = torch.randn(size, generator=maker).to(device, dtype)
    added = more if adds else None
    hidden = x.clone()
    found = norm(hidden, weight, 1e-5, added)
    assert near(hidden, x.double() + more.double(), dtype, 2) if adds else torch.equal(hidden, x)
    wide = hidden.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert near(found, exact, dtype, 5)
    assert near(found, norm_reference(hidden.clone(), weight, 1e-5), dtype, 5)
    for row in range(rows):
        alone = norm(x[row : row + 1].clone(), weight, 1e-5, None if added is None else added[row : row + 1])
        assert torch.equal(alone[0], found[row])
    if not adds:
        assert torch.equal(norm(torch.cat([x, x], 1)[:, size:], weight, 1e-5), found)
    else:
        assert torch.equal(norm(x.clone(), weight, 1e-5, more.T.contiguous().T), found)


@examples(12)
@given(
    rows=st.integers(1, 4),
    size=st.sampled_from([1, 64, 1000, 1025]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    seed=st.integers(0, 99),
)
def test_gate(device: str, dtype: torch.dtype, rows: int, size: int, activation: Activation, seed: int) -> None:
    maker = torch.Generator().manual_seed(seed)
    both = (8 * torch.randn(rows, 2 * size, generator=maker)).to(device, dtype)
    found = gate(both, activation)
    first, second = both.double().chunk(2, -1)
    active = {
        Activation.SILU: first * torch.sigmoid(first),
        Activation.GELU_TANH: first * (1 + torch.tanh(math.sqrt(2 / math.pi) * (first + 0.044715 * first**3))) / 2,
        Activation.GELU: first * (1 + torch.erf(first / math.sqrt(2))) / 2,
    }
    of = None if activation == Activation.SILU else first * second
    assert near(found, active[activation] * second, dtype, 6, of)
    assert near(found, gate_reference(both, activation), dtype, 6, of)
    for row in range(rows):
        assert torch.equal(gate(both[row : row + 1], activation)[0], found[row])


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("value", [-math.inf, -1e30, -200.0, -80.0, 0.0, 200.0, math.inf, math.nan])
def test_gate_of_extreme_values(device: str, value: float, activation: Activation) -> None:
    both = torch.tensor([[value, 1.0, 2.0, 3.0]], device=device)
    found, wanted = gate(both, activation), gate_reference(both, activation)
    finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), finite)  # PyTorch gives NaN for some infinities
    assert torch.allclose(found[finite], wanted[finite], rtol=1e-5, atol=1e-30)


@examples(15)
@given(
    rows=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    sizes=st.sampled_from([(64, 64, 64), (80, 32, 80), (96, 96, 48), (16, 8, 24)]),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotate(
    device: str,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    normed: bool,
    seed: int,
) -> None:
    """Queries normed and turned, keys too and bounded, values bounded; nobody else's place in the cache is touched."""
    maker = torch.Generator().manual_seed(seed)
    (size, turned, value), (of_queries, of_keys) = sizes, heads
    projected = torch.randn(rows, (of_queries + of_keys) * size + of_keys * value, generator=maker).to(device, dtype)
    projected[0, -1], projected[0, of_queries * size] = math.inf, math.nan
    angles = 100 * torch.rand(rows, turned // 2, generator=maker).to(device)
    places = torch.randperm(8, generator=maker)[:rows].to(device)
    caches = [torch.full((8, of_keys, n), 7.0, device=device, dtype=dtype) for n in (size, value) * 2]
    norms = HeadNorms(torch.randn(2, size, generator=maker).to(device, dtype), 1e-5) if normed else None
    found = rotate(projected, angles.cos(), angles.sin(), places, caches[0], caches[1], norms)
    wanted = rotate_reference(projected, angles.cos(), angles.sin(), places, caches[2], caches[3], norms)
    # Sums of products that cancel differ by roundings of the products.
    for one, other in ((found, wanted), (caches[0], caches[2]), (caches[1], caches[3])):
        assert one.isfinite().all() == other.isfinite().all()
        assert (one.double() - other.double()).abs().nan_to_num(0).max() <= (8 + 24 * normed) * ROUNDED[dtype] * 4
    assert caches[0].isfinite().all()
    assert caches[1].isfinite().all()
    for row in range(rows):
        again = [torch.full((8, of_keys, n), 7.0, device=device, dtype=dtype) for n in (size, value)]
        one = slice(row, row + 1)
        alone = rotate(projected[one], angles[one].cos(), angles[one].sin(), places[one], *again, norms)
        assert torch.equal(alone[0].nan_to_num(0), found[row].nan_to_num(0))
        assert all(torch.equal(a[places[row]], b[places[row]]) for a, b in zip(again, caches, strict=False))
