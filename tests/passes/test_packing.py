"""Packing: every row lands where it should, whatever windows a pass is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK, PERIOD, attend_blocks
from detgen.passes.packing import Shapes, Window, pack

SLOTS, SLOT_SIZE = 8, 2 * PERIOD
SCRATCH = SLOTS * SLOT_SIZE
CPU = torch.device("cpu")


def rows_of(found: list[Window]) -> list[tuple[int, int, int]]:
    """(slot, position, token) of each row, in order."""
    return [(w.slot, w.start + i, t) for w in found for i, t in enumerate(w.tokens)]


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_rows(data: st.DataObject, windows: Any, shapes: Any, group: int) -> None:
    """Ids, positions and buffer places are those of the windows in order; padding goes to the scratch position."""
    found, like = data.draw(windows), data.draw(shapes)
    packed = pack(found, like, SLOT_SIZE, SCRATCH, group, CPU)
    rows = rows_of(found)
    n, total = len(rows), len(packed.ids)
    assert packed.ids[:n].tolist() == [t for _, _, t in rows]
    assert packed.positions[:n].tolist() == [p for _, p, _ in rows]
    assert packed.kv_positions[:n].tolist() == [s * SLOT_SIZE + p for s, p, _ in rows]
    assert packed.padding == total - n
    assert set(packed.kv_positions[n:].tolist()) <= {SCRATCH}
    assert total == like.fit_rows(n)
    assert packed.positions.shape == packed.ids.shape
    assert packed.kv_positions.shape == (total,)


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_wanted_logits(data: st.DataObject, windows: Any, shapes: Any, group: int) -> None:
    """The last rows of each window, as many as it asks for, in order; padded to an allowed row count."""
    found, like = data.draw(windows), data.draw(shapes)
    packed = pack(found, like, SLOT_SIZE, SCRATCH, group, CPU)
    want, at = [], 0
    for w in found:
        at += len(w.tokens)
        want += list(range(at - w.logits, at))
    assert packed.count == len(want)
    assert packed.wanted[: packed.count].tolist() == want
    assert len(packed.wanted) == like.fit_rows(max(len(want), 1))
    assert int(packed.wanted.max()) < len(packed.ids)


@given(rows=st.integers(1, 128), keys=st.integers(1, 5 * PERIOD))
def test_fits(rows: int, keys: int) -> None:
    """The least allowed count that holds what is asked."""
    lengths = (2 * BLOCK, PERIOD)
    some = Shapes(rows=(4, 16, 64, 128), dense=False, tile_rows=4, key_lengths=lengths, attend=attend_blocks)
    assert some.fit_rows(rows) == min(n for n in some.rows if n >= rows)
    allowed = [i * PERIOD + n for i in range(6) for n in (2 * BLOCK, PERIOD)]
    assert some.fit_keys(keys) == min(n for n in allowed if n >= keys)
    dense = Shapes(rows=(4, 128), dense=True, tile_rows=4, key_lengths=(PERIOD,), attend=attend_blocks)
    assert dense.fit_rows(rows) == max(rows, 4)
    assert some.most_rows == dense.most_rows == 128
    for shapes in (some, dense):
        with pytest.raises(ValueError, match="129 rows"):
            shapes.fit_rows(129)
