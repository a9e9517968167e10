"""Steps whose inputs stay as they are have the numbers that are stored, one behind the other."""

from __future__ import annotations

import pytest
import torch

from detgen.kernels.c.panels import joined
from detgen.program.widening import in_floats


@pytest.mark.parametrize("inputs", [2, 4, 130])
def test_pairs(inputs: int) -> None:
    """A single one, too, which stands like a row of its own."""
    weight = torch.randn(40, inputs).bfloat16()
    found = in_floats(joined([weight], [], "pairs")).data
    assert found.is_contiguous()
    assert found.transpose(1, 2).flatten(0, 1)[:40].equal(weight.float())
