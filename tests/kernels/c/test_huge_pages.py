"""Memory for weights: what is made of it keeps apart, whatever sizes come in whatever order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c import huge_pages

DTYPES = tuple(map(np.dtype, (np.uint8, np.float16, np.float32)))


@examples(50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=3), st.sampled_from(DTYPES), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_arrays_keep_apart(wanted: list[tuple[list[int], np.dtype[Any], bool]]) -> None:
    """Also once others have gone."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(huge_pages, "_CHUNK", 1 << 16)
        held = []
        for i, (shape, dtype, stays) in enumerate(wanted):
            made = huge_pages.empty(*shape, dtype=dtype)
            made.fill(i)
            assert (list(made.shape), made.dtype) == (shape, dtype)
            assert made.flags.c_contiguous
            assert made.ctypes.data % 64 == 0 or not made.size
            if stays:
                held.append((i, made))
        del made
        assert all((array == i).all() for i, array in held)


def test_pages_are_huge() -> None:
    """Where the system gives such pages to whoever asks for them."""
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not told.is_file() or "[never]" in told.read_text():
        pytest.skip("this system has no huge pages")

    def huge() -> int:
        return sum(map(int, re.findall(r"AnonHugePages: +(\d+)", Path("/proc/self/smaps").read_text())))

    before = huge()
    made = huge_pages.empty(64 << 20, dtype=DTYPES[0])
    made.fill(1)
    assert huge() - before > 48 << 10
    assert made[-1] == 1


def test_no_memory_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 1 << 60)
    monkeypatch.setattr(huge_pages, "_rest", memoryview(b""))
    made = huge_pages.empty(3, 5, dtype=DTYPES[1])
    made.fill(1)
    assert made.sum() == 15


def test_a_system_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_THERE", False)
    assert huge_pages.empty(3, 5, dtype=DTYPES[1]).shape == (3, 5)
