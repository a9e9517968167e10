"""Tiles: every row meets its own slot's keys, and its result comes back to its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers.examples import examples
from helpers.packings import PAGES, SLOT_SIZE, SLOTS
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK, AttentionTraits, cut_pieces
from detgen.passes.packing import Shapes, Window, Windows, pack
from detgen.passes.tiles import Tiles, attention_area, group_pieces

CPU = torch.device("cpu")


def tiles_of(
    found: list[Window], shapes: Shapes, tables: np.ndarray, group: int
) -> tuple[Tiles, list[tuple[int, int]], int]:
    """Tiles of a pass, (slot, position) of each of its rows, and how many rows it has with padding."""
    packed = pack(Windows.of(found), shapes, tables, PAGES * BLOCK, group, CPU)
    return packed.tiles(), [(w.slot, w.start + i) for w in found for i in range(len(w.tokens))], len(packed.ids)


@examples(50)
@given(data=st.data(), group=st.integers(1, 5))
def test_every_row_has_its_place(data: st.DataObject, windows: Any, shapes: Any, tables: Any, group: int) -> None:
    """Each row stands once, at its position, in a tile of an allowed width and key length."""
    found, like = data.draw(windows), data.draw(shapes)
    tiles, rows, _ = tiles_of(found, like, data.draw(tables), group)
    places: dict[int, list[int]] = {}
    for tile in tiles.tiles:
        assert tile.rows.shape == tile.positions.shape
        assert tile.rows.shape[1] == tile.width
        assert tile.query_rows == like.pad_query_rows(group * tile.width)
        assert tile.query_rows % like.tile_rows == 0
        assert 0 <= tile.query_rows - group * tile.width < like.tile_rows
        assert tile.length == like.fit_keys(tile.length), "a length of the class"
        assert tile.positions.max() < tile.length
        for row, position in zip(tile.rows.reshape(-1).tolist(), tile.positions.reshape(-1).tolist(), strict=True):
            places.setdefault(row, []).append(position)
    for i, (_, position) in enumerate(rows):
        assert position in places[i]
        assert i == 0 or len(places[i]) == 1


def through(tiles: Tiles, q: torch.Tensor, kv_heads: int, tables: np.ndarray) -> torch.Tensor:
    """What attention would give if it returned each query with the slot and KV head of its tile added."""
    keys = torch.full((PAGES + 1, BLOCK, kv_heads, 1), -1.0)  # the scratch page stays so
    slots = torch.from_numpy(np.repeat(np.arange(SLOTS), SLOT_SIZE // BLOCK))
    keys[torch.from_numpy(tables.reshape(-1))] = slots.view(-1, 1, 1, 1) * 1000.0
    values = torch.arange(kv_heads).view(1, -1, 1).expand((PAGES + 1) * BLOCK, -1, 1) * 100.0
    now = iter(tiles.tiles)

    def attend(part: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *_: object) -> torch.Tensor:
        tile = next(now)
        assert part.shape[:2] == (k.shape[0], kv_heads)
        assert mask.shape == (k.shape[0], 1, part.shape[2], k.shape[1])
        assert k.shape[:2] == (len(tile.rows), tile.length)
        seen = torch.from_numpy(tile.positions.max(1))[:, None] >= torch.arange(tile.length) // BLOCK * BLOCK
        assert torch.equal(k[:, :, 0, 0], torch.where(seen, k[:, :1, 0, 0], -1.0)), "its own pages, then scratch"
        return part + (k[:, :1] + v[:, :1]).transpose(1, 2)

    return tiles.attend(q, keys.flatten(0, 1), values.contiguous(), attend, AttentionTraits(1.0))


@examples(50)
@given(
    data=st.data(),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    beside=st.integers(0, 2),
    turned=st.booleans(),
)
def test_there_and_back(
    data: st.DataObject,
    windows: Any,
    shapes: Any,
    tables: Any,
    group: int,
    kv_heads: int,
    beside: int,
    turned: bool,
) -> None:
    """Each head of each row reads its own slot and KV head and comes back, whatever the layout of the queries."""
    found, like, table = data.draw(windows), data.draw(shapes), data.draw(tables)
    tiles, rows, total = tiles_of(found, like, table, group)
    heads = group * kv_heads
    whole = torch.arange(total * (heads + beside) * 2.0).view(total, heads + beside, 2)
    if turned:  # heads first in memory, as transformers' models bring them
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    q = whole[:, :heads]
    out = through(tiles, q, kv_heads, table)
    assert out.shape == q.shape
    kv = torch.arange(heads) // group * 100.0
    for i, (slot, _) in enumerate(rows):
        assert torch.equal(out[i], q[i] + slot * 1000.0 + kv[:, None])


@examples(25)
@given(
    data=st.data(),
    group=st.integers(1, 4),
    window=st.sampled_from([None, 1, 7, 300, 5000]),
    chunk=st.sampled_from([None, 1, 7, 300, 5000]),
)
def test_masks(
    data: st.DataObject, windows: Any, shapes: Any, tables: Any, group: int, window: int | None, chunk: int | None
) -> None:
    """A row sees its own position and those before it, as far back as window and chunk reach; so do its heads."""
    found, like = data.draw(windows), data.draw(shapes)
    for tile in tiles_of(found, like, data.draw(tables), group)[0].tiles:
        members = len(tile.rows)
        mask = tile.mask(AttentionTraits(1.0, window, chunk=chunk), group, torch.zeros(0))
        assert mask.shape == (members, 1, tile.query_rows, tile.length)
        mask, padding = mask.split([group * tile.width, tile.query_rows - group * tile.width], dim=2)
        assert torch.equal(padding, mask[:, :, -1:].expand_as(padding))
        keys = torch.arange(tile.length)
        at = torch.from_numpy(tile.positions)[:, None, :, None]
        visible = (keys <= at) & ((keys > at - window) if window else True)
        visible &= (keys >= at // chunk * chunk) if chunk else True
        for heads in mask.reshape(members, group, tile.width, tile.length).unbind(1):
            assert torch.equal(heads[:, None] == 0, visible)
            assert torch.equal(heads[:, None] == -torch.inf, ~visible)


def test_a_slot_with_more_keys_than_blocks() -> None:
    """Where the least allowed key length is longer than the table, the scratch page stands for the rest."""
    pieces = cut_pieces(*np.array([(0, 70, 2), (1, 3, 1)]).T, 8)
    tables = np.array([[1, 0], [2, 3]])
    tiles = Tiles(pieces, tables, 9, 3, 1, lambda rows: rows, lambda keys: 512, CPU)
    assert [len(t.rows) for t in tiles.tiles] == [2]
    assert tiles._pages.view(2, 8).tolist() == [[2, *[9] * 7], [1, 0, *[9] * 6]]


@given(
    spans=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 40)), min_size=1, max_size=12),
    most=st.integers(1, 40),
)
def test_groups(spans: list[tuple[int, int]], most: int) -> None:
    """All tokens of all windows are in one tile each, and sharing is never the slower way."""
    starts, lengths = np.array(spans).T
    pieces = cut_pieces(np.arange(len(spans)), starts, lengths, most)
    found = [(slot, start + i, row + i) for slot, start, tokens, row in pieces.tolist() for i in range(tokens)]
    expanded = [(slot, start + i) for slot, (start, tokens) in enumerate(spans) for i in range(tokens)]
    assert found == [(*place, row) for row, place in enumerate(expanded)]
    assert pieces[:, 2].max() <= most
    groups = group_pieces(pieces)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(pieces)))

    def area(members: np.ndarray) -> float:
        _, start, tokens, _ = pieces[members].T
        return attention_area(len(members) * tokens.max(), len(members) * (start + tokens).max())

    assert sum(area(g) for g in groups) <= sum(area(np.array([i])) for i in range(len(pieces))) + 1e-6


def test_alike_windows_share_a_tile_and_others_do_not() -> None:
    """Decoding at many short contexts is one call, which a few long contexts do not blow up."""
    starts = np.array([200 + i % 50 for i in range(60)] + [6000, 6100])
    pieces = cut_pieces(np.arange(62), starts, np.ones(62, dtype=np.int64), 64)
    assert [sorted(g.tolist()) for g in group_pieces(pieces)] == [list(range(60)), [60, 61]]
