"""The linear layer in Triton: right, and the same bits for a row whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels.triton.linear import linear


@examples(12)
@given(
    rows=st.sampled_from([1, 2, 15, 17, 40, 130]),
    inputs=st.sampled_from([1, 64, 100, 200]),
    outputs=st.sampled_from([1, 64, 70]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_right_and_alone(
    device: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    maker = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=maker).to(device, dtype)
    weight = (inputs**-0.5 * torch.randn(outputs, inputs, generator=maker)).to(device, dtype)
    bias = torch.randn(outputs, generator=maker).to(device, dtype) if biased else None
    found = linear(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert torch.allclose(found.double(), exact, rtol={torch.float32: 1e-5}.get(dtype, 8e-3), atol=1e-5)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], found[row])
    wide, tall = torch.cat([x, x], 1), weight.T.contiguous()
    assert torch.equal(linear(wide[:, inputs:], tall.T, bias), found)
