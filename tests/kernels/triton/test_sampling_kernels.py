"""Choosing in Triton: tokens, leads and log-probabilities have the bits of a CPU's, alone and beside others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.errors import RequestError
from detgen.kernels import sampling as reference
from detgen.kernels.logprobs import Scores
from detgen.kernels.penalties import Adjustment, Mask
from detgen.kernels.sampling import Choice, Choices, check_filters
from detgen.kernels.triton import (
    filter_kernels,
    float_functions,
    noise_kernels,
    row_reading,
    sampling_kernels,
)
from detgen.kernels.triton.sampling_kernels import Asked, choose, unpack
from detgen.params import SamplingParams
from detgen.program.arithmetic import log_softmax

# What overflows float32 is meant to; on a GPU nobody says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Small = Callable[[], AbstractContextManager[None]]


def found(
    logits: torch.Tensor, choices: list[Choice], device: str, choose: Callable[..., torch.Tensor] = choose
) -> Scores:
    """By the kernels, of logits with larger numbers behind each row."""
    given = torch.cat([logits, torch.full_like(logits, 1e9)], 1).to(device)[:, : logits.shape[1]]
    before = given.clone()
    packed = choose(given, Asked.of(Choices.of(choices)).to(device))
    assert given.view(torch.int32).equal(before.view(torch.int32)), "the logits are only read"
    return unpack(packed.cpu())


def wanted(logits: torch.Tensor, choices: list[Choice]) -> Scores:
    """By the references, row by row: scores of all entries, and the order of sums that docs/numerics.md states."""
    tokens, leads = [], []
    for row, choice in zip(logits, choices, strict=True):
        if choice.adjustment is not None:
            there = choice.adjustment.ids < len(row)
            known = Adjustment(choice.adjustment.ids[there], choice.adjustment.terms[:, there], choice.adjustment.mask)
            choice = replace(choice, adjustment=known)
        score = reference.scores(row, choice)
        tokens.append(int(score.argmax()))
        rest = np.append(np.delete(score, tokens[-1]), -np.inf).max()
        leads.append(float(score[tokens[-1]]) - float(rest) + 0.0)
    own = logits[torch.arange(len(logits)), tokens]
    logprobs = log_softmax(logits)[torch.arange(len(logits)), tokens]
    return Scores(np.array(tokens), np.array(leads), logprobs.numpy(), own.isfinite().numpy())


def same(one: Scores, other: Scores) -> bool:
    """In bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one[:4], other[:4], strict=True))


def only(scores: Scores, rows: list[int]) -> Scores:
    return scores.only(np.array(rows))


def adjustment(vocabulary: int, seed: int, share: float = 0.0, size: int = 40) -> Adjustment:
    """Of some entries, an id that the rows do not have among them: biased, penalized, or banned; a share is masked."""
    draw = np.random.default_rng(seed)
    ids = np.append(draw.permutation(vocabulary)[:size], vocabulary + 3)
    terms = np.stack(
        [
            *(draw.normal(0, 3, len(ids)), draw.choice([1.0, 1.1, 0.7], len(ids))),
            *(draw.choice([0.0, 0.3, 5.1], len(ids)), draw.choice([0.0, 0.2], len(ids))),
            draw.choice([np.inf, -np.inf], len(ids), p=[0.9, 0.1]),
        ]
    )
    bits = np.packbits(draw.random(vocabulary // 8 * 8 + 32) >= share, bitorder="little")
    return Adjustment(ids, terms.astype(np.float32), Mask(bits) if share else None)


CHOICES = st.builds(
    Choice,
    temperature=st.sampled_from([0.0, 1e-310, 1e-4, 0.01, 0.7, 1.0, 1e9]),
    top_p=st.sampled_from([1.0, 1.0, 0.9137, 0.1019]),
    top_k=st.sampled_from([0, 0, 1, 40]),
    min_p=st.sampled_from([0.0, 0.0, 1e-5, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 3),
    position=st.integers(0, 2**40),
    adjustment=st.one_of(
        st.none(), st.builds(adjustment, st.just(530), st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.98]))
    ),
)


@examples(7)
@given(
    choices=st.lists(CHOICES, min_size=2, max_size=2),
    spread=st.sampled_from([0.0, 0.3, 4.0, 30.0]),
    whole=st.booleans(),
    special=st.sampled_from([None, None, -torch.inf, -3e38, -0.0]),
    seed=st.integers(0, 10**6),
    one=st.integers(0, 1),
)
def test_as_on_a_cpu(
    small_sections: Small,
    device: str,
    choices: list[Choice],
    spread: float,
    whole: bool,
    special: float | None,
    seed: int,
    one: int,
) -> None:
    """Rows with parameters of their own; then one of them alone."""
    maker = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, 530, generator=maker)
    if whole:
        logits = logits.round()
    if special is not None:
        logits[torch.rand(logits.shape, generator=maker) < 0.3] = special
    with small_sections():
        together = found(logits, choices, device)
        alone = found(logits[[one]], [choices[one]], device)
    assert same(together, wanted(logits, choices))
    assert together.finite.all()
    assert same(alone, only(together, [one]))


@pytest.mark.parametrize("vocabulary", [1, 257, 9001])
def test_greedy_rows_of_any_length(device: str, vocabulary: int) -> None:
    """Without a table, by blocks as they are on a GPU: the largest logits, lowest ids first."""
    logits = (3 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).round()
    assert same(unpack(choose(logits.to(device)).cpu()), wanted(logits, [Choice()] * 3))


def test_a_vocabulary_of_real_size(device: str) -> None:
    """Sampled, cut and adjusted by blocks as they are on a GPU."""
    logits = 4 * torch.randn(2, 9001, generator=torch.Generator().manual_seed(2))
    choices = [
        Choice(1.0, seed=2**64 - 1, position=9),
        Choice(0.8, 1.0, 20, 0.01, 1, adjustment=adjustment(9001, 1, 300)),
    ]
    assert same(found(logits, choices, device), wanted(logits, choices))


def test_what_is_not_finite_stays_in_its_row(small_sections: Small, device: str) -> None:
    """NaN or infinity anywhere breaks its row, but for an infinity that is banned."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3))
    ban = Adjustment(np.array([9]), np.array([[0], [1], [0], [0], [-np.inf]], np.float32))
    choices = [Choice(1.0, 0.9), Choice(1.0, 0.9, seed=1), Choice(1.0), Choice(1.0), Choice(), Choice(adjustment=ban)]
    with small_sections():
        before = found(logits[:1], choices[:1], device)
        logits[1, 7], logits[2, 290], logits[3], logits[4, 299] = torch.nan, torch.inf, -torch.inf, torch.nan
        logits[5, 9] = torch.inf
        after = found(logits, choices, device)
        plain = reference.choose(logits.clone(), choices).tokens
    assert after.finite.tolist() == [True, False, False, False, False, True]
    assert after.finite.tolist() == np.isfinite(logits.numpy()[np.arange(6), plain]).tolist()
    assert (after.tokens[~after.finite] == sampling_kernels.BROKEN).all()
    assert after.tokens[5] == plain[5]
    assert same(only(after, [0]), before)


KERNELS = {
    filter_kernels: ("_weigh", "_list", "_settle"),
    row_reading: ("_read",),
    sampling_kernels: ("_score", "_choose"),
}


@pytest.mark.parametrize(
    ("choice", "launches"),
    [
        (Choice(), 2),
        (Choice(adjustment=adjustment(300, 0)), 2),
        (Choice(0.8, min_p=0.1), 3),
        (Choice(0.8, 0.9, 20, 0.1, adjustment=adjustment(300, 0)), 6),
    ],
)
def test_few_launches(
    small_sections: Small, device: str, monkeypatch: pytest.MonkeyPatch, choice: Choice, launches: int
) -> None:
    made: list[str] = []

    class Counted:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            made.append(self._name)
            return self._kernel[grid]

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    with small_sections():
        found(logits, [choice], device)
    assert len(made) == launches


def test_no_sum_is_left_to_the_interpreter() -> None:
    """It adds bfloat16 as if it were integers, and multiplies matrices in an order of its own: neither occurs here."""
    for module in (filter_kernels, float_functions, noise_kernels, row_reading, sampling_kernels):
        assert "tl.dot" not in Path(str(module.__file__)).read_text()
    for narrow in (torch.bfloat16, torch.float16):
        with pytest.raises(AssertionError):
            choose(torch.zeros(1, 300, dtype=narrow))


def test_a_filter_that_the_kernels_lack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if top_k were new: whoever asks for it is told."""
    check_filters(SamplingParams(top_k=2), "cuda")
    monkeypatch.setattr(sampling_kernels, "KNOWN", sampling_kernels.KNOWN - {"top_k"})
    with pytest.raises(RequestError, match="top_k is not supported on cuda; leave it out, or give 0"):
        check_filters(SamplingParams(top_k=2), "cuda")
    check_filters(SamplingParams(top_p=0.5), "cuda")


def test_the_only_candidate_has_an_infinite_lead(small_sections: Small, device: str) -> None:
    logits = torch.full((3, 530), -torch.inf)
    logits[:, 300] = 1.0
    with small_sections():
        scores = found(logits, [Choice(), Choice(0.8), Choice(0.8, 0.9)], device)
    assert scores.tokens.tolist() == [300] * 3
    assert scores.leads.tolist() == [np.inf] * 3
    assert scores.logprobs.tolist() == [0.0] * 3


# The module, the row of `ROWS` that shows it, what is there, and what is put in its place.
MUTATIONS: dict[str, tuple[ModuleType, int, str, str]] = {
    "ties to the last": (
        row_reading,
        0,
        "tl.min(tl.where(x == most, at, vocabulary), 0)",
        "tl.max(tl.where(x == most, at, 0), 0)",
    ),
    "no mask": (row_reading, 1, 'at, mask=there, other=float("-inf"))\n    if ADJUSTS', "at)\n    if ADJUSTS"),
    "another order of sums": (row_reading, 1, "fold(total, SECTION // 128)", "tl.sum(total, 1)"),
    "sums of a section": (row_reading, 1, "largest = tl.max(top, 1)", "largest = tl.max(top, 1) * 0 + tl.max(top)"),
    "adjusted in place": (row_reading, 2, "copy = copies + row * vocabulary", "copy = source"),
    "terms of another row": (
        row_reading,
        2,
        "for start in range(first, last, MANY)",
        "for start in range(first * 0, last, MANY)",
    ),
    "noise by the row": (sampling_kernels, 3, "block, TILE // 4)", "block + row, TILE // 4)"),
    "too high a bound": (sampling_kernels, 3, "limit - 1e-4 - 1e-6 * tl.abs(limit)", "limit + 8.0"),
    "float32 scores": (
        sampling_kernels,
        3,
        "scaled + gumbel(word)",
        "(scaled + gumbel(word)).to(tl.float32).to(tl.float64)",
    ),
    "one runner-up a section": (
        sampling_kernels,
        0,
        "tl.where(place == found, rest, x)",
        'tl.where(place == found, -float("inf"), x)',
    ),
}
ROWS = (
    Choice(),
    Choice(),
    Choice(adjustment=adjustment(530, 2)),
    Choice(1.3, seed=1),
    Choice(0.9, 0.8, 30, seed=3),
)


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, Scores]:
    """The logits that belong to ROWS, in the first a tie; and what is right."""
    logits = 3 * torch.randn(5, 530, generator=torch.Generator().manual_seed(4))
    logits[0, [100, 200]] = 20.0
    return logits, wanted(logits, list(ROWS))


def test_what_mutations_are_tried_on(small_sections: Small, device: str, batch: tuple[torch.Tensor, Scores]) -> None:
    with small_sections():
        assert same(found(batch[0], list(ROWS), device), batch[1])


@pytest.mark.parametrize("name", ["", *MUTATIONS])
def test_mutations_are_found(
    small_sections: Small, device: str, batch: tuple[torch.Tensor, Scores], name: str, tmp_path: Path
) -> None:
    """A row that stands behind another one has everything right, but for a kernel that is mutated."""
    module, row, old, new = MUTATIONS.get(name, (sampling_kernels, 4, "", ""))
    source = Path(str(module.__file__)).read_text()
    assert old in source
    path = tmp_path / "mutated.py"
    path.write_text(source.replace(old, new) if old else source)
    spec = importlib.util.spec_from_file_location(f"mutated_{abs(hash(name))}", path)
    assert spec is not None
    assert spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    logits, right = batch
    with small_sections(), pytest.MonkeyPatch.context() as patch:
        for constant, value in (("SECTION", 256), ("_TILE", 128)):
            patch.setattr(mutated, constant, value, raising=False)
        if module is row_reading:
            patch.setattr(sampling_kernels, "read", mutated.read)
        chosen = mutated.choose if module is sampling_kernels else choose
        try:
            both = found(logits[[0, row]], [Choice(adjustment=adjustment(530, 7)), ROWS[row]], device, chosen)
        except AssertionError:
            assert name == "adjusted in place"
            return
    assert same(only(both, [1]), only(right, [row])) == (not name)
