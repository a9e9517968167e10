"""Choosing and judging take their kernels where logits are on CUDA, with the bits of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

import detgen.kernels.logprobs as judging
from detgen.kernels import sampling
from detgen.kernels.logprobs import Judged, judge_rows
from detgen.kernels.penalties import Adjustment
from detgen.kernels.sampling import Choice, Choices, Chosen, choose
from detgen.kernels.triton.sampling_kernels import choose_by, choose_reference, unpack
from detgen.program.arrays import same_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def as_on_cuda() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def on_cuda(patch: pytest.MonkeyPatch) -> None:
    for module in (sampling, judging):
        patch.setattr(module, "has_kernels", lambda logits: True)


def both(
    patch: pytest.MonkeyPatch,
    logits: torch.Tensor,
    choices: list[Choice] | None,
    rows: np.ndarray | None,
    whole: np.ndarray | None,
) -> list[tuple[Chosen, Judged]]:
    """By a CPU's functions, then by kernels."""
    found = []
    for device in (False, True):
        if device:
            on_cuda(patch)
        own = logits.clone()
        picked = choose(own, choices)
        found.append((picked, judge_rows(own, picked, rows, whole)))
    return found


@examples(8)
@given(
    rows=st.integers(1, 4),
    vocabulary=st.sampled_from([5, 300, 1001]),
    full=st.booleans(),
    all_of_them=st.booleans(),
    some=st.booleans(),
    kind=st.sampled_from(["greedy", "sampled", "adjusted"]),
    seed=st.integers(0, 99),
)
def test_the_same_as_on_a_cpu(
    rows: int, vocabulary: int, full: bool, all_of_them: bool, some: bool, kind: str, seed: int
) -> None:
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    terms = np.array([[0.5, 0.0], [1.0, 1.3], [0.0, 0.7], [0.0, 0.2], [np.inf, np.inf]], np.float32)
    adjustment = Adjustment(np.array([1, 3]), terms)
    choices = None
    if kind != "greedy":
        choices = [
            Choice(0.9 * (i % 2), top_p=0.9, seed=seed, sample=i, adjustment=adjustment if kind == "adjusted" else None)
            for i in range(rows)
        ]
    at = np.arange(0, rows, 2) if some else None
    whole = np.arange(len(at) if at is not None else rows)[:: 2 - all_of_them] if full else None
    with pytest.MonkeyPatch.context() as patch:
        (picked, judged), (theirs, other) = both(patch, logits, choices, at, whole)
    assert same_bits(picked.tokens, theirs.tokens)
    assert judged.chosen.tobytes() == other.chosen.tobytes()
    assert judged.margins.tobytes() == other.margins.tobytes()
    assert (judged.logprobs is None) == (other.logprobs is None)
    if judged.logprobs is not None and other.logprobs is not None:
        assert same_bits(judged.logprobs, other.logprobs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_the_chosen_logit(value: float, as_on_cuda: pytest.MonkeyPatch) -> None:
    on_cuda(as_on_cuda)
    logits = torch.zeros(3, 40)
    logits[1, 7] = value
    picked = choose(logits, None)
    finite = logits.gather(-1, picked.tokens[:, None])[:, 0].isfinite()
    assert finite.tolist() == [True, False, True]


def test_tokens_that_were_given(device: str) -> None:
    """Their log-probabilities, beside the largest logits; a row alone has the same."""
    logits = 4 * torch.randn(5, 700, generator=torch.Generator().manual_seed(1))
    tokens = np.array([0, 699, 3, 350, 12])
    found = choose_by(logits.to(device), Choices.largest(tokens)).cpu()
    assert found.equal(choose_reference(logits, Choices.largest(tokens)))
    assert unpack(found).tokens.tolist() == logits.argmax(-1).tolist()
    wanted = judge_rows(logits, Chosen(tokens, np.zeros(5))).chosen
    assert unpack(found).logprobs.tobytes() == wanted.tobytes()
    alone = choose_by(logits[3:4].to(device), Choices.largest(tokens[3:4])).cpu()
    assert alone[0].equal(found[3])


def test_only_rows_that_are_asked_for_reach_the_host(as_on_cuda: pytest.MonkeyPatch) -> None:
    on_cuda(as_on_cuda)
    copied: list[int] = []
    on_host = judging.choosing.logprobs
    as_on_cuda.setattr(
        judging.choosing, "logprobs", lambda logits, *a, **how: copied.append(len(logits)) or on_host(logits, *a, **how)
    )
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    judged = judge_rows(logits, choose(logits, None), np.array([0, 2, 4]), np.array([1]))
    assert copied == [1]
    assert judged.logprobs is not None
    assert np.allclose(judged.logprobs, logits[2:3].log_softmax(-1))
