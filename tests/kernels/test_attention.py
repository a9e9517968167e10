"""Attention of packed rows over pages: the right values, and the same bits whatever stands beside a row."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from helpers.examples import examples, usual
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK, AttentionTraits, lay_out
from detgen.kernels.generic.paged_attention import PagedAttention
from detgen.kernels.input_batch import Window, Windows, pack
from detgen.machine import CPU
from detgen.program.arrays import FLOAT32, array, same_bits
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache

SLOTS, BLOCKS, KV_HEADS = 5, 10, 2
SLOT_SIZE, PAGES = BLOCKS * BLOCK, SLOTS * BLOCKS
Entries = tuple[torch.Tensor, torch.Tensor]


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention in float64: q [rows, size], k and v [keys, size], visible bool [rows, keys]."""
    scores = q.double() @ k.double().T * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1) @ v.double()


@functools.cache
def buffers(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [positions, kv_heads, size] of a full cache, the scratch page included."""
    g = torch.Generator().manual_seed(1)
    shape = ((PAGES + 1) * BLOCK, KV_HEADS, size)
    return torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype)


@functools.cache
def queries(size: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries [slots, slot_size, kv_heads * group, size] of every position."""
    shape = (SLOTS, SLOT_SIZE, KV_HEADS * group, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@given(
    spans=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=9),
    group=st.integers(1, 80),
)
def test_pieces(spans: list[tuple[int, int]], group: int) -> None:
    """Each row of each window is in one piece, of at most 64 query rows or one token, the longest first."""
    starts, lengths = np.array(spans).T
    found = lay_out(np.arange(len(spans)), starts, lengths, group)
    rows = [(row + i, slot, start + i) for slot, start, tokens, row in found.tolist() for i in range(tokens)]
    places = [(slot, p) for slot, (start, tokens) in enumerate(spans) for p in range(start, start + tokens)]
    assert sorted(rows) == [(row, *place) for row, place in enumerate(places)]
    assert all(tokens == 1 or tokens * group <= 64 for tokens in found[:, 2].tolist())
    work = [(tokens + 1) * (start + tokens) for _, start, tokens, _ in found.tolist()]
    assert work == sorted(work, reverse=True)


IN_ORDER = np.arange(PAGES).reshape(SLOTS, BLOCKS)


def run(
    windows: list[Window],
    q: torch.Tensor,
    cached: Entries,
    window: int | None = None,
    softcap: float | None = None,
    tables: np.ndarray = IN_ORDER,
) -> list[torch.Tensor]:
    """Attention of the windows' rows, packed into one pass: [tokens, heads, size] a window."""
    packed = pack(Windows.of(windows), tables, q.shape[2] // KV_HEADS)
    cache = KVCache([(KV_HEADS, q.shape[3], q.shape[3])], BlockManager(PAGES), FLOAT32, CPU)
    cache.write(0, np.arange(len(cached[0])), *(array(x.float()) for x in cached))
    widths = [len(w.tokens) for w in windows]
    rows = torch.cat([q[w.slot, w.start : w.start + width] for w, width in zip(windows, widths, strict=True)])
    k, v = (x.float()[packed.kv_positions] for x in cached)  # as they are there already
    traits = AttentionTraits(q.shape[3] ** -0.5, window, softcap)
    out = PagedAttention(cache).attend(0, rows, k, v, packed, traits)
    assert out.isfinite().all()
    return list(out.split(widths))


@st.composite
def packings(draw: st.DrawFn) -> list[Window]:
    """Windows of up to 128 rows in all, at most one a slot, in any order."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    left, windows = 128, []
    for slot in slots:
        if not left:
            break
        width = draw(st.one_of(st.integers(1, min(16, left)), st.integers(1, left)))
        start = draw(st.one_of(st.integers(0, 70), st.integers(0, SLOT_SIZE - width)))
        windows.append(Window(slot, start, [0] * width, draw(st.integers(0, 1))))
        left -= width
    return windows


@st.composite
def page_tables(draw: st.DrawFn) -> np.ndarray:
    """Pages in any order, the first ones of a slot shared with others."""
    found = np.random.default_rng(draw(st.integers(0, 999))).permutation(PAGES).reshape(SLOTS, BLOCKS)
    for slot, source in enumerate(draw(st.lists(st.integers(0, SLOTS - 1), min_size=SLOTS, max_size=SLOTS))):
        shared = draw(st.integers(0, BLOCKS))
        found[slot, :shared] = found[source, :shared]
    return found


@pytest.mark.parametrize(
    ("size", "group", "dtype"),
    [(16, 1, torch.float32), (64, 2, torch.float32), (32, 3, torch.float32), (64, 2, torch.bfloat16)],
)
@examples(15)
@given(
    windows=packings(),
    window=st.sampled_from([None, 40]),
    softcap=st.sampled_from([None, 2.0]),
    tables=page_tables(),
    threads=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_a_row_is_the_same_in_every_packing(
    size: int,
    group: int,
    dtype: torch.dtype,
    windows: list[Window],
    window: int | None,
    softcap: float | None,
    tables: np.ndarray,
    threads: int,
    data: st.DataObject,
) -> None:
    """Width, place, neighbours, their contexts, pages and threads do not change a bit of a row.

    It is compared with the row in a pass of its own, by one thread, over its pages in order.
    """
    q, cached = queries(size, group, dtype), buffers(size, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = run(windows, q, cached, window, softcap, tables)
        torch.set_num_threads(1)
        for w, out in zip(windows, found, strict=True):
            moved = torch.from_numpy(np.append(tables[w.slot], [PAGES] * (PAGES + 1 - BLOCKS)))
            own = tuple(x.view(-1, BLOCK, *x.shape[1:])[moved].flatten(0, 1) for x in cached)
            width = len(w.tokens)
            for i in {0, width - 1, data.draw(st.integers(0, width - 1))}:
                alone = run([Window(0, w.start + i, [0], 1)], q[w.slot : w.slot + 1], own, window, softcap)
                assert same_bits(out[i], alone[0][0]), (w.slot, i)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "group"), usual([(64, 2), (16, 71)], [(128, 5), (64, 1), (16, 3)]))
def test_every_width(size: int, group: int) -> None:
    """A window of each width up to 128 gives each of its rows the bits that the widest gives it."""
    q, cached = queries(size, group, torch.float32), buffers(size, torch.float32)
    widest = run([Window(1, 7, [0] * 128, 0)], q, cached)[0]
    wrong = [
        n
        for n in usual(range(1, 128, 7), range(1, 128))
        if not same_bits(run([Window(1, 7, [0] * n, 0)], q, cached)[0], widest[:n])
    ]
    assert not wrong, f"widths {wrong}"


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_packed_rows_have_the_right_values(softcap: float | None, window: int | None) -> None:
    """Rows land where they belong: each one's attention is that of its own slot and position."""
    size, group = 32, 2
    windows = [Window(3, 0, [0] * 3, 0), Window(0, 500, [0] * 40, 0), Window(4, 90, [0], 0), Window(2, 63, [0] * 2, 0)]
    tables = np.random.default_rng(5).permutation(PAGES).reshape(SLOTS, BLOCKS)
    q, (k, v) = queries(size, group, torch.float32), buffers(size, torch.float32)
    for w, out in zip(windows, run(windows, q, (k, v), window, softcap, tables), strict=True):
        places = torch.from_numpy(tables[w.slot])[:, None] * BLOCK + torch.arange(BLOCK)
        for i in range(len(w.tokens)):
            at = w.start + i
            own = places.flatten()[0 if window is None else max(0, at - window + 1) : at + 1]
            visible = torch.ones(group, len(own), dtype=torch.bool)
            for head in range(KV_HEADS):
                rows = slice(head * group, head * group + group)
                want = naive(q[w.slot, at, rows], k[own, head], v[own, head], visible, 1 / math.sqrt(size), softcap)
                torch.testing.assert_close(out[i, rows].double(), want, rtol=1e-5, atol=1e-6)


def test_keys_that_a_row_does_not_see_weigh_nothing() -> None:
    """What stands behind a row's position or before its window, however large, has no influence on a bit."""
    q = queries(16, 2, torch.float32)
    k, v = (x.clone() for x in buffers(16, torch.float32))
    windows = [Window(1, 70, [0] * 5, 0), Window(2, 300, [0], 0)]
    clean = run(windows, q, (k, v), 100)
    seen = torch.zeros(len(k), dtype=torch.bool)
    seen[SLOT_SIZE : SLOT_SIZE + 75] = True
    seen[2 * SLOT_SIZE + 201 : 2 * SLOT_SIZE + 301] = True
    k[~seen], v[~seen] = 1e4, -1e30
    for one, other in zip(clean, run(windows, q, (k, v), 100), strict=True):
        assert same_bits(one, other)
