"""What is chosen on the device counts there as an adjuster counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.breaking import broken
from helpers.examples import examples

from detgen.kernels.penalties import Adjuster, Penalties
from detgen.kernels.triton import drafted_rounds, growing_lists
from detgen.kernels.triton.growing_lists import GrowingLists
from detgen.kernels.triton.rounds_self_test import rounds_right

TOKENS = st.integers(0, 30)
PENALTIES = st.builds(
    Penalties,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    frequency=st.sampled_from([0.0, 0.1, -0.7]),
    presence=st.sampled_from([0.0, 0.3]),
    bias=st.sampled_from([(), ((3, 1.5), (9, -0.2))]),
    banned=st.sampled_from([frozenset(), frozenset({2, 3})]),
    min_tokens=st.integers(0, 6),
)


def assert_alike(adjuster: Adjuster | None, text: list[int], ids: torch.Tensor, terms: torch.Tensor) -> None:
    """The entries of a row are those of the adjuster behind a text, beside free ones."""
    wanted = None if adjuster is None else adjuster.after(text)
    own, found = ids.tolist(), terms.cpu().numpy().copy()
    entries = {id: column.tobytes() for id, column in zip(own, found.T, strict=True)}
    free = np.array([0, 1, 0, 0, np.inf], np.float32).tobytes()
    assert entries.pop(-1, free) == free
    if wanted is None:
        assert set(entries.values()) <= {free}
    else:
        assert list(own[: len(wanted.ids)]) == wanted.ids.tolist()
        assert entries == {
            id: np.ascontiguousarray(column).tobytes()
            for id, column in zip(wanted.ids.tolist(), wanted.terms.T, strict=True)
        }


@examples(40)
@given(data=st.data(), count=st.integers(1, 3))
def test_they_are_those_of_adjusters(device: str, data: st.DataObject, count: int) -> None:
    """Of sequences that begin in any pass and end in any other; nothing is done to some."""
    prompts, texts = ([data.draw(st.lists(TOKENS, max_size=9)) for _ in range(count)] for _ in range(2))
    penalties = [data.draw(st.none() | PENALTIES) for _ in range(count)]
    begins = sorted(data.draw(st.integers(0, 2)) for _ in range(count))
    lengths = [data.draw(st.integers(1, 5)) for _ in range(count)]
    adjusters = [None if p is None else Adjuster(p, prompt) for p, prompt in zip(penalties, prompts, strict=True)]
    growing = [None if a is None else a.growing(text) for a, text in zip(adjusters, texts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_lists, "_MANY", 4)
        made = GrowingLists.of(growing, np.array(lengths), torch.device(device))
        before = np.zeros(0, np.int64)
        for step in range(max(b + n for b, n in zip(begins, lengths, strict=True))):
            there = np.array([i for i in range(count) if begins[i] <= step < begins[i] + lengths[i]], np.int64)
            goes = [i for i in there.tolist() if i in before]
            tokens = [data.draw(TOKENS) for _ in goes]
            for i, token in zip(goes, tokens, strict=True):
                texts[i].append(token)
            if len(there):
                depth = step - np.array(begins)[there]
                bounds, ids, terms = made.after(there, depth, torch.tensor(tokens, dtype=torch.int64, device=device))
                for i, (first, last) in zip(there.tolist(), bounds.tolist(), strict=True):
                    assert_alike(adjusters[i], texts[i], ids[first:last], terms[:, first:last])
            before = there


def try_rounds(module: Any, device: str, data: st.DataObject) -> None:
    """Compares the entries of rows in three rounds, in which drafts of up to three tokens are accepted or not."""
    count, most, rounds = data.draw(st.integers(1, 3)), 3, 3
    prompts, texts = ([data.draw(st.lists(TOKENS, max_size=9)) for _ in range(count)] for _ in range(2))
    penalties = [data.draw(st.none() | PENALTIES) for _ in range(count)]
    adjusters = [None if p is None else Adjuster(p, prompt) for p, prompt in zip(penalties, prompts, strict=True)]
    growing = [None if a is None else a.growing(text) for a, text in zip(adjusters, texts, strict=True)]
    lengths = np.array([len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)])
    own = module.GrowingLists.of(growing, np.full(count, rounds * (1 + most)), torch.device(device))
    lists = module.DraftedLists(own, lengths + own.left, 0, 5)
    sheet = torch.zeros(count, 5 + most, dtype=torch.int64, device=device)
    sheet[:, 0] = torch.from_numpy(lengths)
    owner, depth = np.repeat(np.arange(count), 1 + most), np.tile(np.arange(1 + most), count)
    for _ in range(rounds):
        drafts = [[data.draw(TOKENS) for _ in range(most)] for _ in range(count)]
        sheet[:, 5:] = torch.tensor(drafts)
        bounds, ids, terms = lists.of("rows", owner, depth, sheet)
        for i, d, (first, last) in zip(owner.tolist(), depth.tolist(), bounds.tolist(), strict=True):
            assert_alike(adjusters[i], texts[i] + drafts[i][:d], ids[first:last], terms[:, first:last])
        before, packed = sheet.clone(), torch.zeros(len(owner), 4, dtype=torch.int32)
        for i, draft in enumerate(drafts):
            accepted = data.draw(st.integers(0, most))
            committed = [*draft[:accepted], data.draw(TOKENS)]
            texts[i] += committed
            sheet[i, 0] += len(committed)
            packed[i * (1 + most) : i * (1 + most) + len(committed), 3] = torch.tensor(committed)
        windows = np.arange(count)
        lists.stand("windows", windows, windows * (1 + most), sheet, before, packed.to(device))


@examples(40)
@given(data=st.data())
def test_drafts_are_counted_in_their_rows(device: str, data: st.DataObject) -> None:
    """And in the sequence once they stand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_lists, "_MANY", 4)
        try_rounds(growing_lists, device, data)


BROKEN = {
    "drafts are not counted": ("for at in range(0, depth):", "for at in range(0, depth - 1):"),
    "what stands is not counted": ("for at in range(0, committed):", "for at in range(1, committed):"),
    "bans hold too long": ("+ depth >= end", "+ depth > end"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_found(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, and by a device's self-test."""
    module = broken(growing_lists, tmp_path, BROKEN[name])

    @settings(max_examples=200, phases=[Phase.generate], database=None, derandomize=True)
    @given(data=st.data())
    def tried(data: st.DataObject) -> None:
        try_rounds(module, device, data)

    with pytest.raises(AssertionError):
        tried()
    for made in ("GrowingLists", "DraftedLists"):
        monkeypatch.setattr(drafted_rounds, made, getattr(module, made))
    assert not rounds_right(device, looked_up=False)
