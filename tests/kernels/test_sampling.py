"""Choosing tokens: the filters are what they say, the best score is found, and rows do not meet."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.examples import examples, usual
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.sampling import Choice, Choices, choose, scores


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether leads have the same bits."""
    return a.tobytes() == b.tobytes()


def decide(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens and margins of all rows."""
    found = choose(logits, None)
    return found.tokens, found.leads


@examples(25)
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
    assert decide(x)[0].tolist() == [70_000, 3, 50_000]


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


def survivors(score: np.ndarray) -> set[int]:
    return set(np.flatnonzero(score > -np.inf).tolist())


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


@examples(80)
@given(rows=st.lists(st.tuples(LOGITS, CHOICES), min_size=1, max_size=6))
def test_filters_keep_what_they_say(rows: list[tuple[list[float], Choice]]) -> None:
    """The sets of a plain Python reference, for rows with parameters of their own, ties included."""
    logits = torch.tensor([x for x, _ in rows])
    for own, (row, choice) in zip(logits, rows, strict=True):
        assert survivors(scores(own, choice)) == kept(row, choice), choice


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (0, 0.5), (2000, 1.0), (0, 0.001)])
def test_ties_in_a_long_row(top_k: int, top_p: float) -> None:
    """Among thousands of equal logits, the lowest ids are kept."""
    choice = Choice(1.0, top_p, top_k)
    row = [float(x) for x in torch.randint(0, 3, (6000,), generator=torch.Generator().manual_seed(2))]
    assert survivors(scores(torch.tensor(row), choice)) == kept(row, choice)


@examples(60)
@given(rows=st.lists(st.tuples(LOGITS, st.one_of(CHOICES, st.just(Choice()))), min_size=2, max_size=8))
def test_rows_do_not_meet(rows: list[tuple[list[float], Choice]]) -> None:
    """Token and lead of a row are the same alone as beside rows with other parameters, ties included."""
    logits = torch.tensor([x for x, _ in rows])
    together = choose(logits, [c for _, c in rows])
    for i, (_, choice) in enumerate(rows):
        alone = choose(logits[i : i + 1], [choice])
        assert alone.tokens.item() == together.tokens[i].item()
        assert same(alone.leads, together.leads[i : i + 1]), "the lead is part of the log"


WIDE = st.builds(
    Choice,
    temperature=st.sampled_from([1e-4, 0.01, 0.5, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.1]),
    top_k=st.sampled_from([0, 0, 1, 40, 2000]),
    min_p=st.sampled_from([0.0, 0.0, 1e-5, 0.3]),
    seed=st.integers(0, 2**63 - 1),
    sample=st.integers(0, 3),
    position=st.integers(0, 2**40),
)


# Of unfiltered tokens, those of a vocabulary's mask, and those that a model excludes.
LOWEST = float(torch.finfo(torch.float32).min)
SPECIAL = st.sampled_from([(), (LOWEST,), (-torch.inf,), (LOWEST, -torch.inf), (3e38,), (1e-42, -1e-42)])


@examples(80)
@given(
    choice=WIDE,
    others=st.lists(st.one_of(st.none(), WIDE), max_size=5),
    width=st.sampled_from([1, 2, 3, 65, 1500, 4096, 33_001]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    special=SPECIAL,
    whole=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_best_score_is_chosen(
    choice: Choice,
    others: list[Choice | None],
    width: int,
    spread: float,
    special: tuple[float, ...],
    whole: bool,
    seed: int,
) -> None:
    """Token and lead are those of all scores, though few are computed: alone and beside rows of like parameters."""
    g = torch.Generator().manual_seed(seed)
    alike = [replace(choice, position=choice.position + 1 + i) for i in range(len(others))]
    choices = [choice, *(other or like for other, like in zip(others, alike, strict=True))]
    logits = spread * torch.randn(len(choices), width, generator=g) * torch.rand(len(choices), 1, generator=g)
    logits = logits.round() if whole else logits
    for value in special:
        logits[torch.rand(logits.shape, generator=g) < 0.3] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = []
        for row, one in zip(logits, choices, strict=True):
            score = scores(row, one)
            token = int(score.argmax())
            rest = np.delete(score, token)
            lead = float(score[token] - rest.max()) if len(rest) and math.isfinite(score[token]) else math.inf
            expected.append((token, lead))
        found = choose(logits, choices)
        assert list(zip(found.tokens.tolist(), found.leads.tolist(), strict=True)) == expected
        for i, one in enumerate(choices):
            alone = choose(logits[i : i + 1], [one])
            assert (alone.tokens.item(), alone.leads[0]) == expected[i]


@pytest.mark.parametrize(
    ("width", "temperature"),
    usual([(1, 1.0), (2, 1e-3), (1, 1e4)], itertools.product((1, 2), (1.0, 1e-3, 1e4))),
)
def test_no_row_is_left_without_a_candidate(width: int, temperature: float) -> None:
    """The bound of the best is hardly above its score: rounding must not cost it its place."""
    logits = 30 * torch.randn(4000, width, generator=torch.Generator().manual_seed(1))
    choices = [Choice(temperature, seed=i % 7, position=i) for i in range(4000)]
    want = [int(scores(row, choice).argmax()) for row, choice in zip(logits, choices, strict=True)]
    assert choose(logits, choices).tokens.tolist() == want


def same_as_scores(logits: torch.Tensor, choices: list[Choice]) -> None:
    """Tokens and leads, and no warning on the way to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = choose(logits, choices)
        for i, (row, choice) in enumerate(zip(logits, choices, strict=True)):
            score = scores(row, choice)
            second, best = np.sort(score)[-2:]
            assert found.tokens[i] == score.argmax()
            assert found.leads[i] == best - second


@pytest.mark.parametrize("row", [[0.0, LOWEST], [LOWEST, 0.0], [3e38, LOWEST, LOWEST], [1.0, 2.0, LOWEST]])
def test_masked_logits(row: list[float]) -> None:
    """Divided by a temperature below 1, the lowest logit leaves float32."""
    same_as_scores(torch.tensor([row]), [Choice(0.7)])
    same_as_scores(torch.tensor([row] * 3), [Choice(0.7, seed=i) for i in range(3)])


def test_runners_up_that_float32_cannot_tell_apart() -> None:
    """Far below the best, quotients differ by less than float32 resolves."""
    g = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.zeros(60, 1), -3000 + 1e-5 * torch.randn(60, 50, generator=g)], 1)
    same_as_scores(logits, [Choice(1e-3, seed=i) for i in range(60)])


def test_rows_that_need_all_their_entries_beside_others() -> None:
    """Of every other row the first thousand entries have less than top_p of the probability."""
    spread = torch.tensor([8.0, 0.1] * 8)[:, None]
    logits = spread * torch.randn(16, 4096, generator=torch.Generator().manual_seed(0))
    same_as_scores(logits, [Choice(1.0, 0.9, seed=i) for i in range(16)])


def test_the_order_in_memory_does_not_count() -> None:
    """Sums of a row in another order would move the boundary of top_p, here set on a sum."""
    row = torch.randn(65, generator=torch.Generator().manual_seed(0))
    plain = row.repeat(40, 1)
    turned = row.repeat(40, 1).t().contiguous().t()
    share = np.exp(row.double().numpy() - float(row.max()))
    for sum_before in np.cumsum(np.sort(share)[::-1])[:-1].tolist():
        choices = [Choice(1.0, sum_before / float(share.sum()), seed=i) for i in range(40)]
        one, other = choose(plain, choices), choose(turned, choices)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert same(one.leads, other.leads)


def test_a_broken_row_harms_no_other() -> None:
    """NaN and infinity win their own row, as they do in an argmax."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    choices = [Choice(1.0, 0.9, seed=i) for i in range(4)]
    want = choose(logits, choices).tokens.tolist()
    logits[1, 7], logits[2, 9] = torch.nan, torch.inf
    assert choose(logits, choices).tokens.tolist() == [want[0], 7, 9, want[3]]
    assert choose(logits[1:3], choices[1:3]).tokens.tolist() == [7, 9]
    assert choose(logits, None).tokens.tolist() == logits.numpy().argmax(1).tolist()
    assert [int(scores(row, c).argmax()) for row, c in zip(logits[1:3], choices[1:3], strict=True)] == [7, 9]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300, 1e-310])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """As the temperature goes to 0, the choice goes to the argmax; no overflow on the way changes it."""
    logits = torch.tensor([[1.0, -2.0, 9.0, 3.0, 8.0]])
    for choice in (Choice(temperature), Choice(temperature, top_p=0.9), Choice(temperature, top_k=3, min_p=0.1)):
        assert choose(logits, [choice]).tokens.tolist() == [2]


def test_rows_do_not_meet_at_full_width() -> None:
    """The same with a real vocabulary, where library kernels would divide the work, and with other threads."""
    g = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(40, 32_003, generator=g)
    choices = [
        Choice(0.7 + i / 40, (1.0, 0.9)[i % 2], (0, 50, 5000)[i % 3], (0.0, 0.01)[i % 2], 3, i % 4, i)
        for i in range(40)
    ]
    torch.set_num_threads(1)
    alone = [choose(logits[i : i + 1], choices[i : i + 1]) for i in range(40)]
    torch.set_num_threads(2)
    together = choose(logits, choices)
    assert together.tokens.tolist() == [a.tokens.item() for a in alone]
    assert same(together.leads, np.concatenate([a.leads for a in alone]))


def test_greedy_rows_take_the_argmax() -> None:
    """At temperature 0 no other parameter has a say, and nothing is added."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    top = logits.double().topk(2).values
    greedy = choose(logits, [Choice(), Choice(0.0, 0.1, 1, 0.9, 5, 1, 2)])
    assert greedy.tokens.tolist() == logits.argmax(-1).tolist()
    assert same(choose(logits, None).leads, greedy.leads)
    assert np.array_equal(greedy.leads, (top[:, 0] - top[:, 1]).numpy())
    mixed = choose(logits, [Choice(), Choice(5.0, seed=3)])
    assert mixed.tokens[0] == greedy.tokens[0]
    assert same(mixed.leads[:1], greedy.leads[:1])
    assert same(mixed.leads[1:], choose(logits[1:], [Choice(5.0, seed=3)]).leads)
    assert np.array_equal(scores(logits[0], Choice(0.0, 0.1)), logits[0].double().numpy())


@examples(30)
@given(choices=st.lists(st.one_of(CHOICES, st.just(Choice())), min_size=1, max_size=6))
def test_arrays_say_the_same(choices: list[Choice]) -> None:
    """`Choices` is another form of several choices."""
    arrays = Choices.of(choices)
    assert [arrays[i] for i in range(len(arrays))] == choices
    logits = torch.randn(len(choices), 30, generator=torch.Generator().manual_seed(0))
    one, other = choose(logits, choices), choose(logits, arrays)
    assert np.array_equal(one.tokens, other.tokens)
    assert same(one.leads, other.leads)


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
        counts = Counter(choose(logits.expand(n, -1), some).tokens.tolist())
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
    target = choose(logits, choices).tokens
    assert (choose(near, choices).tokens == target).mean() > 0.9
    assert (choose(near, others).tokens == target).mean() < 0.6
