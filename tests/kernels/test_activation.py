"""Activations: a row's bits do not depend on how many rows there are or how many threads share them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN

from detgen.kernels.activation import RowwiseActivation, rowwise
from detgen.passes.rewriting import align_activations

FUNCTIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid}


@examples(40)
@given(
    rows=st.integers(1, 600),
    columns=st.sampled_from([96, 160, 704, 1376]),
    threads=st.integers(1, 5),
    name=st.sampled_from(sorted(FUNCTIONS)),
    sliced=st.booleans(),
)
def test_a_row_is_the_same_in_any_company(rows: int, columns: int, threads: int, name: str, sliced: bool) -> None:
    """Whatever the rows and the threads: each row as it is alone, also where rows are slices of wider ones."""
    wide = torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(rows))
    x = wide[:, :columns] if sliced else wide[:, :columns].contiguous()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = rowwise(FUNCTIONS[name], x)
        torch.set_num_threads(1)
        for i in {0, rows // 3, rows // 2, rows - 1}:
            assert torch.equal(out[i], FUNCTIONS[name](x[i : i + 1])[0]), (i, rows)
    finally:
        torch.set_num_threads(before)
    assert out.shape == x.shape


def test_activation_modules_are_replaced() -> None:
    """Those of transformers and of torch, wherever they stand; what they compute stays."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Sequential(ACT2FN["gelu_pytorch_tanh"]), ACT2FN["gelu_new"])
    x = torch.randn(3, 4)
    want = model(x)
    assert align_activations(model) == 3
    assert sum(isinstance(m, RowwiseActivation) for m in model.modules()) == 3
    assert torch.equal(model(x), want)
