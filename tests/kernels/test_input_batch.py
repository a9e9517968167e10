"""Packing: every row lands where it should, whatever windows a pass is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Window, Windows, fill_passes, pack


def rows_of(found: list[Window]) -> list[tuple[int, int, int]]:
    """(slot, position, token) of each row, in order."""
    return [(w.slot, w.start + i, t) for w in found for i, t in enumerate(w.tokens)]


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_rows(data: st.DataObject, windows: Any, tables: Any, group: int) -> None:
    """Ids, positions and buffer places are those of the windows in order."""
    found, table = data.draw(windows), data.draw(tables)
    packed = pack(Windows.of(found), table, group)
    rows = rows_of(found)
    assert packed.ids.tolist() == [t for _, _, t in rows]
    assert packed.positions.tolist() == [p for _, p, _ in rows]
    assert packed.kv_positions.tolist() == [table[s, p // BLOCK] * BLOCK + p % BLOCK for s, p, _ in rows]


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_wanted_logits(data: st.DataObject, windows: Any, tables: Any, group: int) -> None:
    """The last rows of each window, as many as it asks for, in order; one where nobody asks."""
    found = data.draw(windows)
    packed = pack(Windows.of(found), data.draw(tables), group)
    want, at = [], 0
    for w in found:
        at += len(w.tokens)
        want += list(range(at - w.logits, at))
    assert packed.count == len(want)
    assert packed.wanted.tolist() == (want or [0])


@examples(50)
@given(data=st.data())
def test_windows_as_arrays(data: st.DataObject, windows: Any) -> None:
    """Arrays hold the same windows, in parts and together."""
    found = data.draw(windows)
    whole = Windows.of(found)
    assert list(whole) == found
    assert len(whole) == len(found)
    cut = data.draw(st.integers(0, len(found)))
    first, last = whole.part(0, cut), whole.part(cut, len(found))
    assert list(first) == found[:cut]
    assert list(last) == found[cut:]
    assert list(first.joined(last)) == found
    there = np.array([data.draw(st.booleans()) for _ in found], bool)
    assert list(whole.only(there)) == [window for window, kept in zip(found, there, strict=True) if kept]


def filled(windows: list[Window], reads: list[Window], most: int) -> Iterator[list[Window]]:
    """What `fill_passes` does, window by window."""
    batch: list[Window] = []
    free = most
    for window in windows:
        if len(window.tokens) > free:
            yield batch
            batch, free = [], most
        batch.append(window)
        free -= len(window.tokens)
    for read in reads:
        for i, token in enumerate(read.tokens):
            if not free:
                yield batch
                batch, free = [], most
            asked = int(i >= len(read.tokens) - read.logits)
            if i and batch:
                before = batch.pop()
                batch.append(Window(read.slot, before.start, [*before.tokens, token], before.logits + asked))
            else:
                batch.append(Window(read.slot, read.start + i, [token], asked))
            free -= 1
    if batch:
        yield batch


@examples(100)
@given(data=st.data(), most=st.integers(1, 40))
def test_passes_are_filled(data: st.DataObject, windows: Any, most: int) -> None:
    """Windows stay whole, prompts fill the rest, all in order and no pass larger than allowed."""
    found = data.draw(windows)
    count = data.draw(st.integers(0, len(found)))
    reads = found[count:]
    whole = [Window(w.slot, w.start, w.tokens[:most], min(w.logits, most)) for w in found[:count]]
    passes = [list(batch) for batch in fill_passes(Windows.of(whole), reads, most)]
    assert passes == list(filled(whole, reads, most))
    assert all(0 < sum(len(w.tokens) for w in batch) <= most for batch in passes)


def test_one_pass_is_the_windows_themselves() -> None:
    whole = Windows.of([Window(0, 4, [1, 2], 1), Window(1, 0, [3], 1)])
    assert list(fill_passes(whole, [], 3)) == [whole]
    assert list(fill_passes(Windows.of([]), [], 3)) == []
