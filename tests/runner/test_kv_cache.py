"""The KV cache: buffers of pages, read and written through a table, never moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.machine import CPU
from detgen.program.arrays import BFLOAT16, FLOAT32
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.kv_cache import KVCache

SHAPES = [(2, 8, 8), (2, 8, 16), (1, 4, 4)]


def make(count: int = 6) -> KVCache:
    return KVCache(SHAPES, BlockManager(count), FLOAT32, CPU)


def addresses(cache: KVCache) -> list[int]:
    return [x.ctypes.data for x in (*cache.keys, *cache.values)]


def fill(cache: KVCache, slot: int, first: int, last: int, value: float) -> None:
    at = np.array([cache.pages.tables[slot, p // PAGE] * PAGE + p % PAGE for p in range(first, last)])
    for layer, (heads, dk, dv) in enumerate(SHAPES):
        cache.write(layer, at, np.full((len(at), heads, dk), value), np.full((len(at), heads, dv), value + 0.5))


def read(cache: KVCache, slot: int, last: int) -> list[float]:
    """What the first `last` positions of a slot were filled with, the same in all layers, heads and entries."""
    found: set[tuple[float, ...]] = set()
    for layer, (heads, dk, dv) in enumerate(SHAPES):
        one = KVCache([], cache.pages, FLOAT32, CPU)
        one.keys, one.values = cache.keys[layer : layer + 1], cache.values[layer : layer + 1]
        keys, values = one.entries(slot, 0, last)
        assert keys.shape == (1, last, heads * dk)
        assert values.shape == (1, last, heads * dv)
        found |= {tuple(column) for column in keys[0].T.tolist()}
        found |= {tuple(x - 0.5 if x else 0.0 for x in column) for column in values[0].T.tolist()}
    assert len(found) == 1
    return list(found.pop())


def test_finite_from_the_start() -> None:
    """All entries, the scratch page's too, are finite before anything was written: 0 times NaN is NaN."""
    cache = make()
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert np.isfinite(keys).all()
        assert np.isfinite(values).all()
        assert len(values) == len(keys) == 7
    assert cache.positions == cache.scratch == 6 * PAGE


def test_slots_do_not_meet() -> None:
    """A slot's entries are where its table says, in pages that lie anywhere."""
    cache = make()
    cache.pages.take(2, 1)
    cache.pages.take(0, 2)
    assert cache.pages.grow(2, 3)
    before = addresses(cache)
    fill(cache, 2, 0, 150, 1.0)
    fill(cache, 0, 10, 120, 2.0)
    assert read(cache, 2, 151) == [1.0] * 150 + [0.0]
    assert read(cache, 0, 128) == [0.0] * 10 + [2.0] * 110 + [0.0] * 8
    assert cache.keys[0][1, 0, 0, :12].tolist() == [0.0] * 10 + [2.0] * 2, "page 1 is the second one taken"
    assert addresses(cache) == before


def test_truncation_is_in_place() -> None:
    """Writing again behind a rolled-back length replaces entries where they are, and leaves those before it."""
    cache = make()
    cache.pages.take(0, 3)
    before = addresses(cache)
    fill(cache, 0, 0, 130, 1.0)
    cache.pages.truncate(0, 2)
    fill(cache, 0, 100, 110, 2.0)
    assert addresses(cache) == before
    assert read(cache, 0, 128) == [1.0] * 100 + [2.0] * 10 + [1.0] * 18


def test_entries() -> None:
    """A copy of a slot's entries, a row a position."""
    cache = KVCache([(2, 3, 5)] * 2, BlockManager(4), FLOAT32, CPU)
    cache.pages.lay_out(2, 100)
    cache.write(1, np.array([128 + 64]), np.arange(6.0).reshape(1, 2, 3), np.arange(10.0).reshape(1, 2, 5))
    keys, values = cache.entries(1, 63, 66)
    assert keys.shape == (2, 3, 6)
    assert values.shape == (2, 3, 10)
    assert keys[1, 1].tolist() == list(range(6))
    assert values[1, 1].tolist() == list(range(10))
    assert np.count_nonzero(keys) == 5
    keys[:] = 0
    assert cache.entries(1, 63, 66)[0][1, 1].tolist() == list(range(6))


def test_entries_of_layers_of_other_sizes() -> None:
    """Zeros stand behind those of the smaller layers."""
    cache = KVCache([(2, 3, 3), (1, 4, 4)], BlockManager(4), FLOAT32, CPU)
    cache.pages.lay_out(1, 64)
    cache.write(0, np.array([0]), np.ones((1, 2, 3)), np.ones((1, 2, 3)))
    cache.write(1, np.array([0]), np.ones((1, 1, 4)), np.ones((1, 1, 4)))
    for entries in cache.entries(0, 0, 2):
        assert entries.tolist() == [[[1] * 6, [0] * 6], [[1, 1, 1, 1, 0, 0], [0] * 6]]


@given(
    source=st.integers(0, 3),
    target=st.integers(0, 3),
    positions=st.one_of(st.integers(0, PAGE), st.sampled_from([1, 63])),
)
@examples(30)
def test_copy(source: int, target: int, positions: int) -> None:
    """The first positions of a page, in all layers, and not one more; the source and other pages stay."""
    if source == target:
        return
    cache = make(4)
    cache.pages.lay_out(4, PAGE)
    for slot in range(4):
        fill(cache, slot, 0, PAGE, slot + 1.0)
    cache.copy(source, target, positions)
    for slot in range(4):
        copied = positions if slot == target else 0
        assert read(cache, slot, PAGE) == [source + 1.0] * copied + [slot + 1.0] * (PAGE - copied)
    assert not any(x[4:].any() for x in cache.keys), "the scratch page"
    assert not any(x[4:].any() for x in cache.values), "the scratch page"


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_position_bytes(dtype: np.dtype[Any]) -> None:
    """What a position takes is what the arrays take, a page more for scratch; in 16 bits it is half."""
    cache = KVCache(SHAPES, BlockManager(6), dtype, CPU)
    taken = sum(x.nbytes for x in (*cache.keys, *cache.values))
    assert taken == 7 * PAGE * KVCache.position_bytes(SHAPES, dtype) == 7 * PAGE * cache.entry_bytes
    assert cache.entry_bytes == dtype.itemsize * (2 * 16 + 2 * 24 + 8)


def test_one_table_for_two_caches() -> None:
    """A draft model's cache has the target's pages."""
    pages = BlockManager(4)
    target, draft = (KVCache(shapes, pages, FLOAT32, CPU) for shapes in (SHAPES[:1], [(1, 2, 2)]))
    pages.take(1, 2)
    draft.write(0, np.array([PAGE + 1]), np.ones((1, 1, 2)), np.ones((1, 1, 2)))
    assert draft.entries(1, 65, 66)[0].all()
    assert not target.entries(1, 65, 66)[0].any()
