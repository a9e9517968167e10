"""Tiles: every row meets its own slot's keys, and its result comes back to its place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import PERIOD, AttentionTraits
from detgen.passes.packing import Shapes, Window, pack
from detgen.passes.tiles import Piece, Tiles, group_pieces, pieces, tile_area

SLOTS, SLOT_SIZE = 8, 2 * PERIOD
CPU = torch.device("cpu")


def tiles_of(found: list[Window], shapes: Shapes, group: int) -> tuple[Tiles, list[tuple[int, int]], int]:
    """Tiles of a pass, (slot, position) of each of its rows, and how many rows it has with padding."""
    packed = pack(found, shapes, SLOT_SIZE, SLOTS * SLOT_SIZE, group, CPU)
    return packed.tiles, [(w.slot, w.start + i) for w in found for i in range(len(w.tokens))], len(packed.ids)


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_every_row_has_its_place(data: st.DataObject, windows: Any, shapes: Any, group: int) -> None:
    """Each row stands once, in a tile of its slot at its position, of an allowed width and key length."""
    found, like = data.draw(windows), data.draw(shapes)
    tiles, rows, _ = tiles_of(found, like, group)
    places: dict[int, list[tuple[int, int]]] = {}
    for tile in tiles.tiles:
        assert 0 <= tile.first < tile.last <= SLOTS
        assert tile.rows.shape == tile.positions.shape == (tile.last - tile.first, tile.width)
        assert tile.query_rows == like.pad_query_rows(group * tile.width)
        assert tile.query_rows % like.tile_rows == 0
        assert 0 <= tile.query_rows - group * tile.width < like.tile_rows
        assert tile.length <= SLOT_SIZE
        assert tile.length == like.fit_keys(tile.length), "a length of the class"
        assert tile.positions.max() < tile.length
        for slot in range(tile.first, tile.last):
            for row, position in zip(tile.rows[slot - tile.first], tile.positions[slot - tile.first], strict=True):
                places.setdefault(int(row), []).append((slot, int(position)))
    for i, place in enumerate(rows):
        assert place in places[i]
        assert i == 0 or len(places[i]) == 1
    assert tiles.area == sum(tile_area(t.last - t.first, -(-t.query_rows // group), t.length) for t in tiles.tiles)


def through(tiles: Tiles, q: torch.Tensor, kv_heads: int, group: int) -> torch.Tensor:
    """What attention would give if it returned each query with the slot and KV head of its tile added."""
    now = iter(tiles.tiles)

    def read(first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tile = next(now)
        assert (tile.first, tile.last, tile.length) == (first, last, length)
        slots = torch.arange(first, last).view(-1, 1, 1, 1).expand(-1, length, kv_heads, 1) * 1000.0
        return slots, torch.arange(kv_heads).view(1, 1, -1, 1).expand(last - first, length, -1, 1) * 100.0

    def attend(part: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *_: object) -> torch.Tensor:
        assert part.shape[:2] == (k.shape[0], kv_heads)
        assert mask.shape == (k.shape[0], 1, part.shape[2], k.shape[1])
        return part + (k[:, :1] + v[:, :1]).transpose(1, 2)

    return tiles.attend(q, kv_heads, read, attend, AttentionTraits(1.0))


@examples(50)
@given(
    data=st.data(),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    beside=st.integers(0, 2),
    turned=st.booleans(),
)
def test_there_and_back(
    data: st.DataObject, windows: Any, shapes: Any, group: int, kv_heads: int, beside: int, turned: bool
) -> None:
    """Each head of each row reads its own slot and KV head and comes back, whatever the layout of the queries."""
    found, like = data.draw(windows), data.draw(shapes)
    tiles, rows, total = tiles_of(found, like, group)
    heads = group * kv_heads
    whole = torch.arange(total * (heads + beside) * 2.0).view(total, heads + beside, 2)
    if turned:  # heads first in memory, as transformers' models bring them
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    q = whole[:, :heads]
    out = through(tiles, q, kv_heads, group)
    assert out.shape == q.shape
    kv = torch.arange(heads) // group * 100.0
    for i, (slot, _) in enumerate(rows):
        assert torch.equal(out[i], q[i] + slot * 1000.0 + kv[:, None])


@examples(25)
@given(data=st.data(), group=st.integers(1, 4), window=st.sampled_from([None, 1, 7, 300, 5000]))
def test_masks(data: st.DataObject, windows: Any, shapes: Any, group: int, window: int | None) -> None:
    """A row sees its own position and those before it, as far back as the sliding window reaches; so do its heads."""
    found, like = data.draw(windows), data.draw(shapes)
    for tile in tiles_of(found, like, group)[0].tiles:
        mask = tile.mask(window, group, torch.zeros(0))
        assert mask.shape == (tile.last - tile.first, 1, tile.query_rows, tile.length)
        mask, padding = mask.split([group * tile.width, tile.query_rows - group * tile.width], dim=2)
        assert torch.equal(padding, mask[:, :, -1:].expand_as(padding))
        keys = torch.arange(tile.length)
        at = torch.from_numpy(tile.positions)[:, None, :, None]
        visible = (keys <= at) & ((keys > at - window) if window else True)
        for heads in mask.reshape(tile.last - tile.first, group, tile.width, tile.length).unbind(1):
            assert torch.equal(heads[:, None] == 0, visible)
            assert torch.equal(heads[:, None] == -torch.inf, ~visible)


@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 900), st.integers(1, 40)), min_size=1, max_size=12),
    most=st.integers(1, 40),
)
def test_groups(spans: list[tuple[int, int, int]], most: int) -> None:
    """All tokens of all windows are in one tile each, no slot twice in a tile, and sharing is never the slower way."""
    spans = list({slot: (slot, start, tokens) for slot, start, tokens in spans}.values())
    cut = pieces(spans, most)
    assert sum(p.tokens for p in cut) == sum(tokens for _, _, tokens in spans)
    assert all(p.tokens <= most for p in cut)
    groups = group_pieces(cut)
    assert sorted(p for g in groups for p in g) == sorted(cut)
    assert all(len({p.slot for p in g}) == len(g) for g in groups)
    assert all(len({p.part for p in g}) == 1 for g in groups)

    keys = {part: max(p.start + p.tokens for p in cut if p.part == part) for part in {p.part for p in cut}}

    @functools.cache
    def area(members: tuple[Piece, ...]) -> int:
        span = max(p.slot for p in members) - min(p.slot for p in members) + 1
        return tile_area(span, max(p.tokens for p in members), keys[members[0].part])

    shared = sum(area(tuple(g)) for g in groups if len(g) > 1)
    assert shared <= sum(area((p,)) for g in groups if len(g) > 1 for p in g)
