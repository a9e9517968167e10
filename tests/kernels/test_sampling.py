"""Choosing tokens: the noise is Philox, the filters are what they say, and rows do not meet."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detgen.kernels.probe import same_bits
from detgen.kernels.sampling import Choice, choose, gumbel, leads, scores

WORD = 2**64 - 1


def decide(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and margins of all rows."""
    best = choose(score)
    return best, leads(score.clone(), best)


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (second >> 64) ^ b ^ k, second & WORD, (first >> 64) ^ d ^ m, first & WORD
        k, m = (k + 0x9E3779B97F4A7C15) & WORD, (m + 0xBB67AE8584CAA73B) & WORD
    return a, b, c, d


# Known-answer vectors of the Random123 library: counter, key, result.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (WORD, WORD, WORD, WORD),
        (WORD, WORD),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_the_reference_is_philox(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, int, int, int]
) -> None:
    assert philox4x64(counter, key) == want


@settings(max_examples=50)
@given(
    seed=st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1)),
    sample=st.integers(0, 1000),
    position=st.one_of(st.integers(0, 3), st.integers(0, 2**40)),
    vocabulary=st.integers(1, 37),
)
def test_noise_is_the_counter_based_stream(seed: int, sample: int, position: int, vocabulary: int) -> None:
    """Entry j at position t: word j % 4 of the block with counter (j // 4, t, 0, 0) and key (seed, sample)."""
    noise = gumbel(seed, sample, position, vocabulary)
    assert noise.dtype == np.float64
    assert noise.shape == (vocabulary,)
    for j in range(vocabulary):
        word = philox4x64((j // 4, position, 0, 0), (seed, sample))[j % 4]
        assert noise[j] == pytest.approx(-math.log(-math.log(((word >> 11) + 0.5) * 2.0**-53)), rel=1e-12, abs=1e-12)


def test_noise_is_finite_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest words the generator can draw still give finite noise."""

    class Ends:
        def __init__(self, **_: object) -> None:
            pass

        def random_raw(self, n: int) -> np.ndarray:
            return np.array([0, WORD] * n, dtype=np.uint64)[:n]

    monkeypatch.setattr(np.random, "Philox", Ends)
    assert np.isfinite(gumbel(0, 0, 0, 4)).all()


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean is Euler's constant, variance pi squared over six, and a sixth part of the draws lies where it should."""
    noise = gumbel(7, 0, 3, 200_000)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < x).mean() == pytest.approx(math.exp(-math.exp(-x)), abs=0.005)


@settings(max_examples=60)
@given(rows=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.5]), min_size=5, max_size=5), min_size=1, max_size=6))
def test_ties_go_to_the_lowest_id(rows: list[list[float]]) -> None:
    """The first of the best entries; the margin is its lead over the best of the others, 0 in a tie."""
    tokens, margins = decide(torch.tensor(rows))
    for row, token, margin in zip(rows, tokens.tolist(), margins.tolist(), strict=True):
        assert token == row.index(max(row))
        assert margin == max(row) - max(row[:token] + row[token + 1 :])


def test_a_tie_in_a_long_row() -> None:
    """Long rows are reduced in parts; the lowest id wins across them, too."""
    x = torch.zeros(3, 100_001)
    x[0, [70_000, 99_999]] = x[1, [3, 4]] = x[2, [50_000, 100_000]] = 5.0
    assert choose(x).tolist() == [70_000, 3, 50_000]


def test_the_only_candidate_has_an_infinite_margin() -> None:
    row = torch.full((1, 6), -torch.inf)
    row[0, 4] = 1.0
    token, margin = decide(row)
    assert (token.item(), margin.item()) == (4, math.inf)


def kept(logits: list[float], choice: Choice) -> set[int]:
    """What the filters keep, in plain Python: temperature, top_k, top_p, min_p; ties to the lower id."""
    scaled = [x / choice.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if choice.top_k:
        order = order[: choice.top_k]
    if choice.top_p < 1:
        shares = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
        total, before, cut = math.fsum(shares), 0.0, []
        for i, share in zip(order, shares, strict=True):
            if before / total < choice.top_p:
                cut.append(i)
            before += share
        order = cut
    if choice.min_p:
        order = [i for i in order if math.exp(scaled[i] - scaled[order[0]]) >= choice.min_p]
    return set(order)


def survivors(score: torch.Tensor) -> set[int]:
    return set(torch.nonzero(score > -torch.inf)[:, 0].tolist())


# Whole numbers make ties; these shares of top_p and min_p are away from what sums of their exponentials can be.
LOGITS = st.lists(st.integers(-4, 4).map(float), min_size=12, max_size=12)
CHOICES = st.builds(
    Choice,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9137, 0.5311, 0.1019, 1e-9]),
    top_k=st.sampled_from([0, 1, 2, 5, 12, 100]),
    min_p=st.sampled_from([0.0, 0.0213, 0.311, 0.99]),
    seed=st.integers(0, 2**63 - 1),
    sample=st.integers(0, 3),
    position=st.integers(0, 100),
)


@settings(max_examples=300)
@given(rows=st.lists(st.tuples(LOGITS, CHOICES), min_size=1, max_size=6))
def test_filters_keep_what_they_say(rows: list[tuple[list[float], Choice]]) -> None:
    """The sets of a plain Python reference, for rows with parameters of their own, ties included."""
    logits = torch.tensor([x for x, _ in rows])
    for score, (row, choice) in zip(scores(logits, [c for _, c in rows]), rows, strict=True):
        assert survivors(score) == kept(row, choice), choice


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (0, 0.5), (2000, 1.0), (0, 0.001)])
def test_ties_in_a_long_row(top_k: int, top_p: float) -> None:
    """Among thousands of equal logits, the lowest ids are kept."""
    choice = Choice(1.0, top_p, top_k)
    row = [float(x) for x in torch.randint(0, 3, (6000,), generator=torch.Generator().manual_seed(2))]
    assert survivors(scores(torch.tensor([row]), [choice])[0]) == kept(row, choice)


@settings(max_examples=200)
@given(rows=st.lists(st.tuples(LOGITS, st.one_of(CHOICES, st.just(Choice()))), min_size=2, max_size=8))
def test_rows_do_not_meet(rows: list[tuple[list[float], Choice]]) -> None:
    """Token, margin and score bits of a row are the same alone as beside rows with other parameters."""
    g = torch.Generator().manual_seed(len(rows))
    noise = torch.randn(len(rows), 12, generator=g)
    logits = torch.tensor([x for x, _ in rows]) + noise
    choices = [c for _, c in rows]
    together = scores(logits, choices)
    tokens, margins = decide(together)
    for i, choice in enumerate(choices):
        own = scores(logits[i : i + 1], [choice])
        assert same_bits(own.double(), together[i : i + 1].double())
        token, margin = decide(own)
        assert token.item() == tokens[i].item()
        assert margin.tolist() == margins[i : i + 1].tolist(), "the margin is part of the log"


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300, 1e-310])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """As the temperature goes to 0, the choice goes to the argmax; no overflow on the way changes it."""
    logits = torch.tensor([[1.0, -2.0, 9.0, 3.0, 8.0]])
    for choice in (Choice(temperature), Choice(temperature, top_p=0.9), Choice(temperature, top_k=3, min_p=0.1)):
        assert choose(scores(logits, [choice])).tolist() == [2]


def test_rows_do_not_meet_at_full_width() -> None:
    """The same with a real vocabulary, where library kernels would divide the work, and with other threads."""
    g = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(40, 32_003, generator=g)
    choices = [
        Choice(0.7 + i / 40, (1.0, 0.9)[i % 2], (0, 50, 5000)[i % 3], (0.0, 0.01)[i % 2], 3, i % 4, i)
        for i in range(40)
    ]
    torch.set_num_threads(1)
    alone = [scores(logits[i : i + 1], choices[i : i + 1]) for i in range(40)]
    torch.set_num_threads(2)
    assert same_bits(scores(logits, choices), torch.cat(alone))


def test_greedy_rows_keep_their_logits() -> None:
    """At temperature 0 no other parameter has a say, and nothing is added."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert scores(logits, [Choice(), Choice(0.0, 0.1, 1, 0.9, 5, 1, 2)]) is logits
    mixed = scores(logits, [Choice(), Choice(1.0)])
    assert torch.equal(mixed[0].float(), logits[0])


@pytest.mark.parametrize("choice", [Choice(1.0), Choice(0.6), Choice(1.0, 0.8, 0, 0.0), Choice(1.5, 1.0, 4, 0.05)])
def test_samples_fit_the_distribution(choice: Choice) -> None:
    """Chi-square of 4,000 draws, over samples and over positions, against the filtered softmax."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    keep = sorted(kept(logits.tolist(), choice))
    p = torch.softmax(logits[keep].double() / choice.temperature, 0)
    n = 4000
    for vary in ("sample", "position", "seed"):
        some = [
            Choice(choice.temperature, choice.top_p, choice.top_k, choice.min_p, **{"seed": 9, vary: i})
            for i in range(n)
        ]
        counts = Counter(choose(scores(logits.expand(n, -1), some)).tolist())
        assert set(counts) <= set(keep)
        chi = sum((counts[t] - n * float(q)) ** 2 / (n * float(q)) for t, q in zip(keep, p, strict=True))
        assert chi < CRITICAL[len(keep) - 1], (vary, chi)


# 0.9999 quantiles of chi-square by degrees of freedom.
CRITICAL = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}


def test_close_distributions_agree_more_often_than_chance() -> None:
    """With the same noise, a drafter of nearly the same logits draws nearly always the same token."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 100, generator=g) * 2
    near = logits + 0.05 * torch.randn(500, 100, generator=g)
    choices = [Choice(1.0, position=i) for i in range(500)]
    others = [Choice(1.0, position=i, seed=1) for i in range(500)]
    target = choose(scores(logits, choices))
    assert (choose(scores(near, choices)) == target).float().mean() > 0.9
    assert (choose(scores(near, others)) == target).float().mean() < 0.6
