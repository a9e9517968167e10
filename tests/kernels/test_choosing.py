"""The compiled choosing gives what the plain one gives, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels import choosing
from detgen.kernels.filters import sample_plain
from detgen.kernels.sampling import Choice, Choices, choose
from detgen.program.arrays import same_bits

LOWEST = float(torch.finfo(torch.float32).min)

CHOICES = st.builds(
    Choice,
    temperature=st.sampled_from([1e-4, 0.01, 0.8, 0.8, 1.0, 1.3, 5.0, 0.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-9]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 1000, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 3),
    position=st.integers(0, 2**40),
)


def both(logits: torch.Tensor, choices: list[Choice]) -> None:
    """Tokens and leads are those of plain numpy, alone and beside other rows."""
    found = choose(logits, choices)
    alone = [choose(logits[i : i + 1], choices[i : i + 1]) for i in range(len(choices))]
    for i, (row, choice) in enumerate(zip(logits.numpy(), choices, strict=True)):
        token, lead = sample_plain(row, choice) if choice.temperature else (row.argmax(), found.leads[i])
        assert found.tokens[i] == token
        assert found.leads[i].tobytes() == np.float64(lead).tobytes()
    assert np.concatenate([a.leads for a in alone]).tobytes() == found.leads.tobytes()


@examples(120)
@given(
    choices=st.lists(CHOICES, min_size=1, max_size=8),
    alike=st.booleans(),
    width=st.sampled_from([1, 2, 7, 63, 64, 65, 255, 1000, 4096, 4097, 50_257]),
    spread=st.sampled_from([0.0, 1e-3, 0.05, 0.3, 2.5, 30.0]),
    peaks=st.booleans(),
    grid=st.sampled_from([0.0, 1.0, 4.0]),
    special=st.sampled_from([None, None, LOWEST, -torch.inf, torch.nan, torch.inf, 3e38, 1e-42]),
    share=st.sampled_from([0.01, 0.3, 0.999]),
    seed=st.integers(0, 10**6),
)
def test_it_chooses_the_same(
    choices: list[Choice],
    alike: bool,
    width: int,
    spread: float,
    peaks: bool,
    grid: float,
    special: float | None,
    share: float,
    seed: int,
) -> None:
    """Whatever the filters and the shape of the row: ties, masks, broken rows, vocabularies that fill no vector."""
    g = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(len(choices), width, generator=g)
    if peaks:
        logits[:, torch.randint(0, width, (5,), generator=g)] += torch.tensor([12.0, 10.0, 9.0, 8.0, 7.0])
    if grid:
        logits = (logits * grid).round() / grid
    if special is not None:
        logits[torch.rand(logits.shape, generator=g) < share] = special
    if alike:
        choices = [replace(choices[0], position=i) for i in range(len(choices))]
    both(logits, choices)


@pytest.mark.parametrize("width", [128_256, 151_936])
def test_it_chooses_the_same_of_a_large_vocabulary(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    logits = torch.tensor([[2.5], [0.05], [0.0]]) * torch.randn(3, width, generator=g)
    logits[0, torch.randint(0, width, (8,), generator=g)] += 10
    for top_p, top_k, min_p in ((1.0, 0, 0.0), (0.95, 0, 0.0), (1.0, 50, 0.0), (1.0, 0, 0.05), (0.9, 5000, 0.001)):
        both(logits, [Choice(t, top_p, top_k, min_p, seed=i) for i, t in enumerate((0.8, 1.3, 1.0))])


def draw(logits: torch.Tensor, choices: Choices) -> choosing.Candidates:
    return choosing.draw(logits, np.arange(len(logits)), choices.how())


def test_no_bound_is_too_low() -> None:
    """Close runners-up in thousands of rows: a bound that is off by a hundredth would lose some."""
    logits = 0.1 * torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))
    choices = Choices.of([Choice(0.8, position=i) for i in range(3000)])
    found = choose(logits, choices)
    plain = [sample_plain(row, choices[i]) for i, row in enumerate(logits.numpy())]
    assert found.tokens.tolist() == [token for token, _ in plain]
    assert found.leads.tolist() == [lead for _, lead in plain]


def test_few_entries_are_left() -> None:
    """The bound is close enough that hardly more than the best two have to be computed."""
    logits = 2.5 * torch.randn(20, 50_000, generator=torch.Generator().manual_seed(0))
    found = draw(logits, Choices.of([Choice(0.8, position=i) for i in range(20)])).found
    assert ((found >= 2) & (found <= 4)).all()


def test_more_candidates_than_there_is_room_for() -> None:
    """So far below the best, noise is lost in rounding, and all others tie for the second place."""
    logits = torch.zeros(1, 300)
    logits[0, 1:] = -3e38
    choices = [Choice(1e-3, seed=1)]
    assert draw(logits, Choices.of(choices)).found[0] == -1
    both(logits, choices)


def test_some_columns_and_rows() -> None:
    """Slices, repeated rows and another order in memory; the sampled rows among others."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    choices = [Choice(1.0, 0.9, seed=i) if i % 2 else Choice() for i in range(6)]
    both(logits[:, :250], choices)
    both(logits[:1].expand(6, -1), choices)
    both(logits.t().contiguous().t(), choices)


def test_threads_share_large_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(5, 4000, generator=g)
    choices = [Choice(0.7, (1.0, 0.9)[i % 2], seed=i) for i in range(5)]
    one = choose(logits, choices), choose(logits, None)
    own = choosing.logprobs(logits, one[1].tokens, None, full=False)
    monkeypatch.setattr(choosing, "_LARGE", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        several = choose(logits, choices), choose(logits, None)
        for a, b in zip(one, several, strict=True):
            assert same_bits(a.tokens, b.tokens)
            assert a.leads.tobytes() == b.leads.tobytes()
        shared = choosing.logprobs(logits, one[1].tokens, None, full=False)
    finally:
        torch.set_num_threads(threads)
    assert own[0].tobytes() == shared[0].tobytes()


@examples(60)
@given(
    rows=st.lists(st.none() | st.tuples(st.integers(0, 40), st.integers(0, 2**32 - 1)), min_size=1, max_size=5),
    width=st.sampled_from([1, 63, 64, 65, 300]),
)
def test_masks(rows: list[tuple[int, int] | None], width: int) -> None:
    """What a mask does not allow, or does not reach, is -inf; NaN stays, and so do rows without a mask."""
    x = np.random.default_rng(width).standard_normal((len(rows), 2 * width), np.float32)[:, :width]
    x[:, ::7] = np.nan
    before = x.copy()
    masks = [None if row is None else np.random.default_rng(row[1]).bytes(row[0]) for row in rows]
    found = choosing.masked(x, [None if mask is None else np.frombuffer(mask, np.uint8) for mask in masks])
    for row, own, mask in zip(found, before, masks, strict=True):
        for i in range(width):
            allowed = mask is None or (i // 8 < len(mask) and mask[i // 8] >> i % 8 & 1)
            want = own[i] if allowed or np.isnan(own[i]) else np.float32(-np.inf)
            assert row[i].view(np.int32) == want.view(np.int32)
    assert same_bits(x, before)
