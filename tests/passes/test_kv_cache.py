"""The KV cache: one buffer, cut into slots, never moved."""

from __future__ import annotations

import pytest
import torch

from detgen.passes.kv_cache import KVCache

SHAPES = [(2, 8, 8), (2, 8, 16), (1, 4, 4)]


def make(positions: int = 96) -> KVCache:
    return KVCache(SHAPES, positions, torch.float32, torch.device("cpu"))


def addresses(cache: KVCache) -> list[int]:
    return [x.data_ptr() for x in (*cache.keys, *cache.values)]


def fill(cache: KVCache, slot: int, first: int, last: int, value: float) -> None:
    at = torch.arange(slot * cache.slot_size + first, slot * cache.slot_size + last)
    for layer, (heads, dk, dv) in enumerate(SHAPES):
        cache.write(layer, at, torch.full((len(at), heads, dk), value), torch.full((len(at), heads, dv), value + 0.5))


def test_finite_from_the_start() -> None:
    """All entries, the scratch position's too, are finite before anything was written: 0 times NaN is NaN."""
    cache = make()
    cache.partition(32, 3)
    for x in (*cache.keys, *cache.values):
        assert torch.isfinite(x).all()
        assert len(x) == 97
    assert cache.scratch == 96


def test_write_and_read() -> None:
    """A slot's entries are read where they were written, as views of the buffer, and nowhere else."""
    cache = make()
    cache.partition(32, 3)
    fill(cache, 1, 4, 9, 3.0)
    for layer, (heads, dk, dv) in enumerate(SHAPES):
        k, v = cache.read(layer, 0, 3, 16)
        assert k.shape == (3, 16, heads, dk)
        assert v.shape == (3, 16, heads, dv)
        assert (k[1, 4:9] == 3.0).all()
        assert (v[1, 4:9] == 3.5).all()
        assert k.count_nonzero() == 5 * heads * dk
        assert k.untyped_storage().data_ptr() == cache.keys[layer].untyped_storage().data_ptr(), "no copy"


def test_partition_moves_no_memory() -> None:
    """Cutting the buffer anew keeps every tensor; the slots tile its first positions."""
    cache = make()
    before = addresses(cache)
    for slot_size, slots in ((32, 3), (96, 1), (10, 9), (1, 96)):
        cache.partition(slot_size, slots)
        assert (cache.slot_size, cache.slots) == (slot_size, slots)
        fill(cache, slots - 1, slot_size - 1, slot_size, 7.0)
        assert (cache.keys[0][slot_size * slots - 1] == 7.0).all()
    assert addresses(cache) == before


def test_partition_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"4 slots of 32 positions exceed the KV buffer of 96"):
        make().partition(32, 4)


def test_truncation_is_in_place() -> None:
    """Writing again behind a rolled-back length replaces entries where they are, and leaves those before it."""
    cache = make()
    cache.partition(32, 3)
    before = addresses(cache)
    fill(cache, 2, 0, 10, 1.0)
    fill(cache, 2, 6, 12, 2.0)
    assert addresses(cache) == before
    for layer in range(len(SHAPES)):
        keys, values = cache.read(layer, 2, 3, 12)
        assert keys[0, :, 0, 0].tolist() == [1.0] * 6 + [2.0] * 6
        assert values[0, :, 0, 0].tolist() == [1.5] * 6 + [2.5] * 6


def test_entries() -> None:
    """A copy of a slot's entries, a row a position."""
    cache = KVCache([(2, 3, 5)] * 2, 64, torch.float32, torch.device("cpu"))
    cache.partition(32, 2)
    cache.write(1, torch.tensor([32 + 4]), torch.arange(6.0).view(1, 2, 3), torch.arange(10.0).view(1, 2, 5))
    keys, values = cache.entries(1, 3, 6)
    assert keys.shape == (2, 3, 6)
    assert values.shape == (2, 3, 10)
    assert keys[1, 1].tolist() == list(range(6))
    assert values[1, 1].tolist() == list(range(10))
    keys.zero_()
    assert cache.entries(1, 3, 6)[0][1, 1].tolist() == list(range(6))


def test_copy_prefix() -> None:
    """The first positions of a slot, in all layers, and not one more; the source stays."""
    cache = make()
    cache.partition(32, 3)
    fill(cache, 0, 0, 20, 4.0)
    fill(cache, 1, 0, 20, 5.0)
    cache.copy_prefix(0, 1, 7)
    for layer in range(len(SHAPES)):
        for x, old, new in zip(cache.read(layer, 0, 2, 20), (5.0, 5.5), (4.0, 4.5), strict=True):
            assert (x[1, :7] == new).all()
            assert (x[1, 7:] == old).all()
            assert (x[0] == new).all()


def test_position_bytes() -> None:
    """What a position takes is what the tensors take, a position more for scratch."""
    cache = make()
    taken = sum(x.numel() * x.itemsize for x in (*cache.keys, *cache.values))
    assert taken == 97 * KVCache.position_bytes(SHAPES, torch.float32)
