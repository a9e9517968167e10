"""Packing: every row lands where it should, whatever windows a pass is made of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK, PERIOD, attend_blocks
from detgen.kernels.packing import FREE_SHAPES, Packed, Shapes, Window, pack

SLOTS, STRIDE = 8, 2 * PERIOD
SCRATCH = SLOTS * STRIDE
CPU = torch.device("cpu")


@st.composite
def windows(draw: st.DrawFn, most: int = 128) -> list[Window]:
    """At most one window a slot, together at most `most` tokens, in any order."""
    left, found = most, []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)):
        width = draw(st.integers(0, min(left, draw(st.sampled_from([1, 8, 16, 17, 60, most])))))
        if not width:
            continue
        left -= width
        tokens = draw(st.lists(st.integers(1, 999), min_size=width, max_size=width))
        start = draw(st.integers(0, STRIDE - width))
        found.append(Window(slot, start, tokens, draw(st.integers(0, width))))
    return found or [Window(0, 0, [1], 1)]


def keys_of(lengths: tuple[int, ...]) -> Shapes:
    return Shapes(rows=(4, 16, 64, 128), dense=False, tile_rows=4, key_lengths=lengths, attend=attend_blocks)


SHAPES = st.sampled_from(
    [
        FREE_SHAPES,
        keys_of((PERIOD,)),
        keys_of((BLOCK, 3 * BLOCK, PERIOD)),
        Shapes(rows=(4, 128), dense=True, tile_rows=4, key_lengths=(2 * BLOCK, PERIOD), attend=attend_blocks),
    ]
)


def rows_of(found: list[Window]) -> list[tuple[int, int, int]]:
    """(slot, position, token) of each row, in order."""
    return [(w.slot, w.start + i, t) for w in found for i, t in enumerate(w.tokens)]


@settings(max_examples=150)
@given(found=windows(), shapes=SHAPES, group=st.integers(1, 5))
def test_rows(found: list[Window], shapes: Shapes, group: int) -> None:
    """Ids, positions and arena places are those of the windows in order; padding goes to the scratch position."""
    packed = pack(found, shapes, STRIDE, SCRATCH, group, CPU)
    rows = rows_of(found)
    n, total = len(rows), packed.ids.shape[1]
    assert packed.ids[0, :n].tolist() == [t for _, _, t in rows]
    assert packed.positions[0, :n].tolist() == [p for _, p, _ in rows]
    assert packed.arena[:n].tolist() == [s * STRIDE + p for s, p, _ in rows]
    assert packed.padding == total - n
    assert set(packed.arena[n:].tolist()) <= {SCRATCH}
    assert total == shapes.fit_rows(n)
    assert packed.positions.shape == packed.ids.shape
    assert packed.arena.shape == (total,)


@settings(max_examples=150)
@given(found=windows(), shapes=SHAPES, group=st.integers(1, 5))
def test_wanted_logits(found: list[Window], shapes: Shapes, group: int) -> None:
    """The last rows of each window, as many as it asks for, in order; padded to an allowed row count."""
    packed = pack(found, shapes, STRIDE, SCRATCH, group, CPU)
    want, at = [], 0
    for w in found:
        at += len(w.tokens)
        want += list(range(at - w.logits, at))
    assert packed.count == len(want)
    assert packed.wanted[: packed.count].tolist() == want
    assert len(packed.wanted) == shapes.fit_rows(max(len(want), 1))
    assert int(packed.wanted.max()) < packed.ids.shape[1]


def through_tiles(packed: Packed, rows: torch.Tensor) -> torch.Tensor:
    """Rows taken into the tiles and put back."""
    parts = [rows if tile.gather is None else rows[tile.gather] for tile in packed.tiles]
    flat = torch.cat(parts)
    return flat if packed.back is None else flat[packed.back]


@settings(max_examples=200)
@given(found=windows(), shapes=SHAPES, group=st.integers(1, 5))
def test_tiles(found: list[Window], shapes: Shapes, group: int) -> None:
    """Each row meets its own slot and position in a tile that reads enough keys, and comes back to its place."""
    packed = pack(found, shapes, STRIDE, SCRATCH, group, CPU)
    rows = rows_of(found)
    n = len(rows)
    total = packed.ids.shape[1]
    back = through_tiles(packed, torch.arange(total))
    assert back[:n].tolist() == list(range(n)), "gather and back are inverse"
    assert len(back) == total

    where: list[tuple[int, int, int]] = []  # slot, position and keys of each place in the tiles
    for tile in packed.tiles:
        assert 0 <= tile.first < tile.last <= SLOTS
        assert tile.positions.shape == (tile.last - tile.first, tile.width)
        assert tile.gather is None or tile.gather.shape == (tile.positions.numel(),)
        assert tile.width * group >= shapes.tile_rows
        assert tile.length <= STRIDE
        assert tile.length == shapes.fit_keys(tile.length), "a length of the class"
        for slot in range(tile.first, tile.last):
            where += [(slot, int(p), tile.length) for p in tile.positions[slot - tile.first]]
    places = range(total) if packed.back is None else packed.back.tolist()
    for (slot, position, _), place in zip(rows, places, strict=False):
        assert where[place][:2] == (slot, position)
        assert where[place][2] > position


@settings(max_examples=60)
@given(found=windows(), group=st.integers(1, 4), window=st.sampled_from([None, 1, 7, 300]))
def test_masks(found: list[Window], group: int, window: int | None) -> None:
    """A row sees its own position and those before it, as far back as the sliding window reaches; so do its heads."""
    for tile in pack(found, FREE_SHAPES, STRIDE, SCRATCH, group, CPU).tiles:
        mask = tile.mask(window, group, torch.float32)
        assert mask.shape == (tile.last - tile.first, 1, group * tile.width, tile.length)
        keys = torch.arange(tile.length)
        at = tile.positions[:, None, :, None]
        visible = (keys <= at) & ((keys > at - window) if window else True)
        for heads in mask.view(tile.last - tile.first, group, tile.width, tile.length).unbind(1):
            assert torch.equal(heads[:, None] == 0, visible)
            assert torch.equal(heads[:, None] == -torch.inf, ~visible)


@given(rows=st.integers(1, 128), keys=st.integers(1, 5 * PERIOD))
def test_fits(rows: int, keys: int) -> None:
    """The least allowed count that holds what is asked."""
    some = keys_of((2 * BLOCK, PERIOD))
    assert some.fit_rows(rows) == min(n for n in some.rows if n >= rows)
    allowed = [i * PERIOD + n for i in range(6) for n in (2 * BLOCK, PERIOD)]
    assert some.fit_keys(keys) == min(n for n in allowed if n >= keys)
    dense = Shapes(rows=(4, 128), dense=True, tile_rows=4, key_lengths=(PERIOD,), attend=attend_blocks)
    assert dense.fit_rows(rows) == max(rows, 4)
    assert some.most_rows == dense.most_rows == 128
