"""The most likely tokens are those of a CPU, with the bits of their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton.sampling_kernels import choose_by, choose_reference, unpack

Small = Callable[[], AbstractContextManager[None]]


@examples(12)
@given(
    wanted=st.lists(st.sampled_from([0, 1, 5, 20]), min_size=1, max_size=3),
    vocabulary=st.sampled_from([12, 300, 1001]),
    spread=st.sampled_from([0.0, 0.3, 4.0]),
    special=st.sampled_from([None, -torch.inf, -0.0]),
    seed=st.integers(0, 10**6),
)
def test_they_are_those_of_a_cpu(
    small_sections: Small,
    device: str,
    wanted: list[int],
    vocabulary: int,
    spread: float,
    special: float | None,
    seed: int,
) -> None:
    """Of equal ones the lower id first, and also of rows that are sampled."""
    maker = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(len(wanted), vocabulary, generator=maker)).round(decimals=1)
    if special is not None:
        logits[torch.rand(logits.shape, generator=maker) < 0.3] = special
    logits[:, 7] = 2.0  # of a row of -inf, nothing is told
    choices = Choices.of([Choice(0.7 * (i % 2), seed=seed) for i in range(len(wanted))])
    choices = replace(choices, likely=np.array(wanted, np.int64))
    with small_sections():
        found = choose_by(logits.to(device), choices, choices.most).cpu()
    expected = choose_reference(logits, choices, choices.most)
    assert found.equal(expected)
    likely = unpack(found).likely
    assert likely is not None
    assert likely.shape == (len(wanted), min(max(wanted), vocabulary))
