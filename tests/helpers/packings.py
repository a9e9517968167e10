"""What passes are made of, for tests of packing: strategies of windows and page tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Window

SLOTS, SLOT_SIZE = 8, 16 * BLOCK
PAGES = SLOTS * SLOT_SIZE // BLOCK


@st.composite
def _windows(draw: st.DrawFn, most: int = 128) -> list[Window]:
    """At most one window a slot, together at most `most` tokens, in any order."""
    left, found = most, []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)):
        width = draw(st.integers(0, min(left, draw(st.sampled_from([1, 8, 16, 17, 60, most])))))
        if not width:
            continue
        left -= width
        tokens = draw(st.lists(st.integers(1, 999), min_size=width, max_size=width))
        start = draw(st.integers(0, SLOT_SIZE - width))
        found.append(Window(slot, start, tokens, draw(st.integers(0, width))))
    return found or [Window(0, 0, [1], 1)]


@st.composite
def _tables(draw: st.DrawFn) -> np.ndarray:
    """All pages in any order."""
    pages = np.random.default_rng(draw(st.integers(0, 999))).permutation(PAGES)
    return pages.reshape(SLOTS, -1)


@pytest.fixture(scope="session")
def windows() -> st.SearchStrategy[list[Window]]:
    """Windows of up to 128 tokens in 8 slots of 1,024 positions."""
    return _windows()


@pytest.fixture(scope="session")
def tables() -> st.SearchStrategy[np.ndarray]:
    """Page tables of these slots, int64 [8, 16], a page in one place each, in any order."""
    return _tables()
