"""What is chosen on the device counts there as an adjuster counts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels.penalties import Adjuster, Penalties
from detgen.kernels.triton import growing_lists
from detgen.kernels.triton.growing_lists import GrowingLists

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
                    adjuster = adjusters[i]
                    wanted = None if adjuster is None else adjuster.after(texts[i])
                    own, found = ids[first:last].tolist(), terms[:, first:last].cpu().numpy().copy()
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
            before = there
