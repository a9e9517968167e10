"""Adjusted logits: those of the reference and of transformers, bit for bit; other entries and other rows stay."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from detgen.kernels.penalties import Adjuster, Adjustment, Mask, Penalties, adjusted, adjusted_row, reference
from detgen.kernels.sampling import Choice, choose, scores
from detgen.program.arrays import same_bits

WIDTH = 40
TOKENS = st.lists(st.integers(0, WIDTH - 1), max_size=12)
PENALTIES = st.builds(
    Penalties,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    frequency=st.sampled_from([0.0, 0.6, -1.1]),
    presence=st.sampled_from([0.0, 0.3, -2.0]),
    bias=st.dictionaries(st.integers(0, WIDTH - 1), st.sampled_from([-100.0, -0.1, 1.7, 100.0]), max_size=4).map(
        lambda found: tuple(sorted(found.items()))
    ),
    banned=st.frozensets(st.integers(0, WIDTH - 1), max_size=3),
    min_tokens=st.integers(0, 4),
)


ALLOWED = st.frozensets(st.integers(0, WIDTH - 1), min_size=1, max_size=9)


def mask(allowed: frozenset[int], width: int = WIDTH) -> Mask:
    bits = np.zeros(-(-width // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return Mask(np.packbits(bits, bitorder="little"))


class Same:
    """The same mask after whatever."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def after(self, completion: list[int]) -> Mask:
        return self._mask


def logits(rows: int, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    return 5 * np.random.default_rng(seed).standard_normal((rows, width), np.float32)


@examples(150)
@given(rows=st.lists(st.tuples(PENALTIES, TOKENS, TOKENS), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_rows_are_those_of_the_reference(rows: list[tuple[Penalties, list[int], list[int]]], seed: int) -> None:
    """Each row has the reference's bits, whatever stands beside it, and its own again afterwards."""
    x = logits(len(rows), seed=seed)
    before = x.copy()
    adjustments = [Adjuster(penalties, prompt).after(completion) for penalties, prompt, completion in rows]
    with adjusted(x, adjustments) as changed:
        for row, own, adjustment, (penalties, prompt, completion) in zip(
            changed, before, adjustments, rows, strict=True
        ):
            want = reference(own, penalties, prompt, completion)
            assert same_bits(row + 0.0, want + 0.0)  # the reference adds nothing to zeros, which may be negative
            assert same_bits(adjusted_row(own, adjustment), row)
            if adjustment is None:
                assert same_bits(row, own)
    assert same_bits(x, before)


@examples(150)
@given(
    rows=st.lists(st.tuples(PENALTIES, TOKENS, TOKENS, st.none() | ALLOWED), min_size=1, max_size=6),
    width=st.sampled_from([WIDTH, 33, 50]),
    nan=st.booleans(),
)
def test_masks_are_those_of_the_reference(
    rows: list[tuple[Penalties, list[int], list[int], frozenset[int] | None]], width: int, nan: bool
) -> None:
    """Entries that a mask does not allow are lost, others are adjusted as without; one that may end does so early.

    Rows of a draft model may be narrower or wider than the mask, and what is not a number stays so.
    """
    x = logits(len(rows), width)
    x[0, 5] = np.nan if nan else 0.5
    before = x.copy()
    masks = [None if allowed is None else mask(allowed) for *_, allowed in rows]
    adjustments = [
        Adjuster(penalties, prompt, None if m is None else Same(m)).after(completion)
        for (penalties, prompt, completion, _), m in zip(rows, masks, strict=True)
    ]
    wide = [np.pad(row, (0, max(WIDTH - width, 0))) for row in before]
    with adjusted(x, adjustments) as changed:
        for row, own, adjustment, given, m in zip(changed, wide, adjustments, rows, masks, strict=True):
            want = reference(own, *given[:3], m)[:width]
            assert same_bits(without_nan(row), without_nan(want))
            if width >= WIDTH:  # only a draft model's are narrower
                assert same_bits(without_nan(adjusted_row(own[:width], adjustment)), without_nan(row))
            if adjustment is not None:  # the same as a list, as kernels for CUDA take it
                found = adjusted_row(own[:width], listed(adjustment, width))
                assert same_bits(without_nan(found), without_nan(row))
    assert same_bits(x, before)


def without_nan(row: np.ndarray) -> np.ndarray:
    """A number in its place, whatever its bits are; the reference adds nothing to zeros, which may be negative."""
    found: np.ndarray = np.nan_to_num(row, nan=77.0, posinf=np.inf, neginf=-np.inf) + np.float32(0)
    return found


def listed(adjustment: Adjustment, width: int) -> Adjustment:
    ids, terms = adjustment.listed()
    assert len(set(ids.tolist())) == len(ids)
    return Adjustment(ids[ids < width], terms[:, ids < width])


@examples(100)
@given(allowed=st.frozensets(st.integers(0, 99), max_size=3))
def test_the_only_token(allowed: frozenset[int]) -> None:
    found = mask(allowed, 100)
    assert found.forced == (next(iter(allowed)) if len(allowed) == 1 else None)
    assert [i for i in range(100) if found.allows(i)] == sorted(allowed)


@examples(100)
@given(penalties=PENALTIES, prompt=TOKENS, texts=st.lists(TOKENS, min_size=1, max_size=8))
def test_an_adjuster_remembers_nothing(penalties: Penalties, prompt: list[int], texts: list[list[int]]) -> None:
    """Whatever it was asked before, such as about drafts that were rolled back: the answer is that of a new one."""
    adjuster = Adjuster(penalties, prompt)
    asked = [(text, adjuster.after(text)) for text in texts]
    x = logits(1)[0]
    for text, found in asked:  # all at the end: no answer changes with a later question
        assert same_bits(adjusted_row(x, found), adjusted_row(x, Adjuster(penalties, prompt).after(text)))


def test_many_different_tokens() -> None:
    """More than there is room for at first, forwards and back."""
    penalties, rng = Penalties(1.1, 0.3, 0.2), random.Random(0)
    text = [rng.randrange(3000) for _ in range(2000)]
    adjuster, x = Adjuster(penalties, text[:50]), logits(1, 3000)[0]
    for n in (3, 2000, 1000, 1001, 0, 700):
        found = adjusted_row(x, adjuster.after(text[:n]))
        assert same_bits(found, reference(x, penalties, text[:50], text[:n]))


def test_rows_without_parameters_are_not_touched() -> None:
    """Neither read nor written: a row of a batch costs nothing where its request asks for nothing."""

    seen: list[np.ndarray] = []

    class Watched(np.ndarray):
        """Keeps what it is indexed with."""

        def __getitem__(self, at: Any) -> Any:
            seen.append(at[0])
            return super().__getitem__(at)

        def __setitem__(self, at: Any, value: Any) -> None:
            seen.append(at[0])
            super().__setitem__(at, value)

    x = logits(3).view(Watched)
    adjustment = Adjuster(Penalties(bias=((3, 1.0), (5, 2.0))), []).after([])
    with adjusted(x, [None, adjustment, None]):
        pass
    assert [rows.tolist() for rows in seen] == [[1, 1]] * 3
    seen.clear()
    with adjusted(x, [None, None, None]):
        pass
    assert seen == []


def test_ids_that_a_draft_model_does_not_have() -> None:
    """They are left out; the others count."""
    adjustment = Adjuster(Penalties(bias=((3, 1.0), (90, 2.0))), []).after([])
    x = logits(1)
    want = x.copy()
    want[0, 3] += 1
    with adjusted(x, [adjustment]):
        assert same_bits(x, want)


@pytest.mark.parametrize("penalty", [1.3, 0.8, 2.0])
def test_repetition_as_in_transformers(penalty: float) -> None:
    x = logits(1, 500)
    prompt, completion = [3, 7, 7, 480], [5, 7, 499]
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + completion]), torch.tensor(x))
    assert same_bits(adjusted_row(x[0], Adjuster(Penalties(penalty), prompt).after(completion)), want[0])


def test_bias_as_in_transformers() -> None:
    x = logits(1, 500)
    bias = ((3, -100.0), (77, 0.1), (499, 1.7))
    want = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias])(
        torch.tensor([[3, 4]]), torch.tensor(x)
    )
    assert same_bits(adjusted_row(x[0], Adjuster(Penalties(bias=bias), [3]).after([4])), want[0])


@pytest.mark.parametrize("generated", [0, 2, 3, 4])
def test_least_tokens_as_in_transformers(generated: int) -> None:
    x = logits(1, 500)
    prompt, completion = [3, 7], [8] * generated
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [0, 9])
    want = processor(torch.tensor([prompt + completion]), torch.tensor(x))
    penalties = Penalties(banned=frozenset({0, 9}), min_tokens=3)
    assert same_bits(adjusted_row(x[0], Adjuster(penalties, prompt).after(completion)), want[0])


def test_frequency_and_presence_as_openai_defines_them() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, of the completion alone."""
    x = logits(1, 50)[0]
    found = adjusted_row(x, Adjuster(Penalties(frequency=0.5, presence=0.25), [1, 2, 3]).after([2, 9, 9, 9, 40]))
    for token in range(50):
        count = [2, 9, 9, 9, 40].count(token)
        assert found[token].item() == pytest.approx(x[token].item() - 0.5 * count - 0.25 * (count > 0), abs=1e-5)


@examples(60)
@given(
    row=st.tuples(PENALTIES, TOKENS, TOKENS),
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    others=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_choices_are_made_from_adjusted_logits(
    row: tuple[Penalties, list[int], list[int]], temperature: float, top_k: int, others: int, seed: int
) -> None:
    """Token and lead are those of the reference's row without penalties, alone and beside rows of any kind."""
    penalties, prompt, completion = row
    x = logits(1 + others, seed=seed)
    before = x.copy()
    adjustment = Adjuster(penalties, prompt).after(completion)
    choice = Choice(temperature, top_k=top_k, seed=seed)
    want = reference(x[0], penalties, prompt, completion)[None]
    plain = choose(want, [choice])
    found = choose(x, [Choice(temperature, top_k=top_k, seed=seed, adjustment=adjustment), *[Choice()] * others])
    assert found.tokens[0] == plain.tokens[0]
    if temperature:
        assert found.leads[0] == plain.leads[0]
    elif adjustment is not None:
        second, top = np.sort(want[0].astype(float))[-2:]
        assert found.leads[0] == top - second
    score = scores(x[0], Choice(temperature, top_k=top_k, seed=seed, adjustment=adjustment))
    assert int(score.argmax()) == plain.tokens[0]
    assert found.tokens[1:].tolist() == before[1:].argmax(-1).tolist()
    assert same_bits(x, before)
