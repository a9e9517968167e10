"""What is chosen of the logits that masks allow is what is chosen of the masked rows, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from detgen.kernels import choosing
from detgen.kernels.allowed import best_allowed
from detgen.kernels.c.layout import RANKED
from detgen.kernels.penalties import Mask


class Told(Mask):
    """Counts how often all bits are asked for."""

    whole = 0

    @property
    def bits(self) -> np.ndarray:
        self.whole += 1
        return self._bits

    @property
    def forced(self) -> int | None:
        return None

    def allows(self, token: int) -> bool:
        return bool(self._bits[token >> 3] >> (token & 7) & 1)


def masked(logits: np.ndarray, masks: list[Told | None]) -> tuple[np.ndarray, ...]:
    """The masked rows; what is chosen of them, its leads and its log-probabilities."""
    changed = choosing.masked(logits, [None if m is None else m._bits for m in masks])
    tokens, leads = choosing.best(changed)
    return changed, tokens, leads, choosing.logprobs(logits, tokens, None, full=False)[0]


@examples(150)
@given(
    width=st.sampled_from([1, 3, 63, 64, 65, 127, 128, 129, 1000, 4097]),
    shares=st.lists(st.sampled_from([None, 0.0, 0.002, 0.3, 0.999]), min_size=1, max_size=6),
    grid=st.sampled_from([0.0, 0.5, 2.0]),
    special=st.sampled_from([None, None, -np.inf, np.inf, np.nan]),
    forced=st.booleans(),
    some=st.booleans(),
    seed=st.integers(0, 10**6),
)
@example(  # all that may come in the last row is -inf
    width=64, shares=[None, None, 0.3, 0.002, 0.002], grid=0.0, special=-np.inf, forced=False, some=False, seed=0
)
def test_it_is_the_masked_rows_choice(
    width: int,
    shares: list[float | None],
    grid: float,
    special: float | None,
    forced: bool,
    some: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(shares), width)).astype(np.float32)
    if grid:
        logits = np.round(logits / grid) * grid  # ties
    if special is not None:
        logits[rng.random(logits.shape) < 0.05] = special
    masks: list[Told | None] = []
    for share in shares:
        allowed = rng.random(width) < (share or 0)
        if not allowed.any():
            allowed[rng.integers(width)] = True
        masks.append(None if share is None else (Mask if forced else Told)(np.packbits(allowed, bitorder="little")))  # type: ignore[arg-type]
    rows = np.flatnonzero(rng.random(len(shares)) < 0.5) if some else np.arange(len(shares))
    found = best_allowed(logits, rows if some else None, [masks[i] for i in rows])
    changed, *wanted = (values[rows] for values in masked(logits, masks))
    # Where all that may come is -inf, nothing is right; the row is told to be broken by what is chosen.
    sound = np.isfinite(changed[np.arange(len(rows)), wanted[0]])
    for values, others in zip(found, wanted, strict=True):
        assert values[sound].tobytes() == others[sound].tobytes()
    assert np.isfinite(changed[np.arange(len(rows)), found.tokens]).tolist() == sound.tolist()


def test_few_questions_are_enough() -> None:
    logits = np.arange(1000, dtype=np.float32)[None]
    for allowed, whole in (([999, 997], 0), ([998, 996], 0), ([998, 3], 1), ([500, 600], 1)):
        bits = np.zeros(1000, bool)
        bits[allowed] = True
        mask = Told(np.packbits(bits, bitorder="little"))
        assert best_allowed(logits, None, [mask]).tokens.tolist() == [max(allowed)]
        assert mask.whole == whole


@pytest.mark.parametrize("width", [1, 2, 5, 64, 200])
def test_the_largest_come_first(width: int) -> None:
    """The first of ties first; what is -inf is none of them."""
    rng = np.random.default_rng(width)
    logits = rng.integers(-3, 3, (5, width)).astype(np.float32)
    logits[logits == 2] = -np.inf
    found = choosing.ranked(logits)
    for row, ids, values in zip(logits, found.ids, found.values, strict=True):
        order = [i for i in np.argsort(-row, kind="stable") if row[i] > -np.inf][:RANKED]
        assert ids.tolist() == [*order, *[-1] * (RANKED - len(order))]
        assert values.tolist() == [*row[order], *[-np.inf] * (RANKED - len(order))]
