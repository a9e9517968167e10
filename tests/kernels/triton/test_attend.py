"""Attention in Triton: right, and the same bits for a row alone, beside others, in other tiles and on other pages."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels.attention import BLOCK, AttentionTraits, cut_pieces
from detgen.kernels.triton import attend as module
from detgen.kernels.triton.attend import attend, attend_reference, most_tokens


@dataclass
class Cache:
    """A cache of pages in any order, with sequences of any length in its slots."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, sequences: list[tuple[torch.Tensor, torch.Tensor]], seed: int) -> Cache:
        """The keys and values [positions, kv_heads, size] of each slot; what lies behind a sequence is arbitrary."""
        k, v = sequences[0]
        blocks = [-(-len(k) // BLOCK) for k, _ in sequences]
        maker = torch.Generator().manual_seed(seed)
        order = torch.randperm(sum(blocks) + 2, generator=maker)
        shape = (len(order) * BLOCK, k.shape[1])
        keys = (1e4 * torch.randn(*shape, k.shape[2], generator=maker)).to(k)
        values = (1e4 * torch.randn(*shape, v.shape[2], generator=maker)).to(v)
        tables = torch.zeros(len(sequences), max(blocks) + 1, dtype=torch.int64)
        used = 0
        for slot, (k, v) in enumerate(sequences):
            tables[slot, : blocks[slot]] = order[used : used + blocks[slot]]
            used += blocks[slot]
            at = torch.arange(len(k))
            places = (tables[slot, at // BLOCK] * BLOCK + at % BLOCK).to(k.device)
            keys[places], values[places] = k, v
        return cls(keys, values, tables.to(k.device))


def run(
    queries: list[torch.Tensor],
    windows: list[tuple[int, int, int]],
    cache: Cache,
    traits: AttentionTraits,
    attend: Callable[..., torch.Tensor] = attend,
) -> list[torch.Tensor]:
    """The results of windows (slot, first position, tokens), given the queries of all positions of each slot."""
    group = queries[0].shape[1] // cache.keys.shape[1]
    slots, starts, lengths = (np.array(column, np.int64) for column in zip(*windows, strict=True))
    pieces = torch.from_numpy(cut_pieces(slots, starts, lengths, most_tokens(group))).to(cache.tables.device)
    rows = torch.cat([queries[slot][start : start + count] for slot, start, count in windows])
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in windows]).to(rows.device)
    longest = int((starts + lengths).max())
    out = attend(rows, cache.keys, cache.values, positions, pieces, cache.tables, longest, traits)
    return list(out.split(lengths.tolist()))


def exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, traits: AttentionTraits) -> torch.Tensor:
    """One row in float64: q [heads, size], k and v [positions, kv_heads, size]."""
    chunk = traits.chunk or position + 1
    low = max(position - (traits.window or position + 1) + 1, position // chunk * chunk)
    group = q.shape[0] // k.shape[1]
    k, v = (x[low : position + 1].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,phd->hp", q.double(), k) * traits.scale
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    return torch.einsum("hp,phd->hd", scores.softmax(-1), v)


@pytest.fixture(autouse=True, scope="module")
def short_splits() -> Iterator[None]:
    """So that few positions make several splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPLIT", 2 * BLOCK)
        yield


SHAPES = st.sampled_from([(1, 1, 64, 64), (4, 2, 16, 16), (14, 2, 64, 64), (3, 1, 80, 96), (2, 2, 128, 128)])


@examples(12)
@given(
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.sampled_from([1, 40, 150])),
    softcap=st.one_of(st.none(), st.just(5.0)),
    chunk=st.one_of(st.none(), st.sampled_from([1, 40, 150])),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_rows_are_right_and_alone(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    seed: int,
    data: st.DataObject,
) -> None:
    """Against float64; then each row by itself, on other pages, has the bits that it has in a window beside others."""
    heads, kv_heads, size, value = shape
    traits = AttentionTraits(size**-0.5, window, softcap, chunk)
    maker = torch.Generator().manual_seed(seed)
    queries = [torch.randn(n, heads, size, generator=maker).to(device, dtype) for n in lengths]
    held = [
        tuple(torch.randn(n, kv_heads, d, generator=maker).to(device, dtype) for d in (size, value)) for n in lengths
    ]
    windows = []
    for slot, n in enumerate(lengths):
        count = data.draw(st.integers(1, min(n, 12)))
        windows.append((slot, data.draw(st.integers(0, n - count)), count))
    found = run(queries, windows, Cache.of(held, seed), traits)
    other = Cache.of(held, seed + 1)
    plain = run(queries, windows, other, traits, attend_reference)
    for (slot, start, count), of, wanted in zip(windows, found, plain, strict=True):
        assert torch.allclose(of.double(), wanted.double(), rtol=0, atol={torch.float32: 2e-5}.get(dtype, 3e-2))
        for i in range(count):
            exact = exactly(queries[slot][start + i], *held[slot], start + i, traits)
            assert torch.allclose(of[i].double(), exact, rtol=0, atol={torch.float32: 2e-5}.get(dtype, 3e-2))
        at = data.draw(st.integers(0, count - 1))
        (alone,) = run(queries, [(slot, start + at, 1)], other, traits)
        assert torch.equal(alone[0], of[at])


def test_what_overflows_stays_in_its_row(device: str) -> None:
    """A query that is not finite changes no other row of its tile."""
    traits = AttentionTraits(0.25)
    maker = torch.Generator().manual_seed(0)
    q = torch.randn(9, 2, 16, generator=maker).to(device)
    held = [(torch.randn(9, 1, 16, generator=maker).to(device), torch.randn(9, 1, 16, generator=maker).to(device))]
    cache = Cache.of(held, 1)
    (wanted,) = run([q], [(0, 0, 9)], cache, traits)
    broken = q.clone()
    broken[4, 0] = math.nan
    broken[6, 1] = math.inf
    (found,) = run([broken], [(0, 0, 9)], cache, traits)
    same = torch.ones(9, 2, dtype=torch.bool)
    same[4, 0] = same[6, 1] = False
    assert torch.equal(found[same], wanted[same])
    assert not found[4, 0].isfinite().any()


MUTATIONS = {
    "splits by number": [
        ("heads // kv_heads, triton.cdiv(longest, SPLIT)", "heads // kv_heads, 2"),
        ("BLOCK, SPLIT),", "BLOCK, BLOCK * triton.cdiv(longest, 2 * BLOCK)),"),
        ("value, width, SPLIT,", "value, width, BLOCK * triton.cdiv(longest, 2 * BLOCK),"),
    ],
    "splits in another order": [("at = (tl.cast(split, tl.int64)", "at = ((tl.cast(split, tl.int64) + row) % 3")],
    "blocks by the number of rows": [
        ("    SPLIT: tl.constexpr,\n    CAPPED", "    STEP: tl.constexpr,\n    SPLIT: tl.constexpr,\n    CAPPED"),
        ("above(size), width, BLOCK, SPLIT", "above(size), width, BLOCK, BLOCK if rows > 1 else 16, SPLIT"),
        ("tl.arange(0, BLOCK)", "tl.arange(0, STEP)"),
        ("tl.zeros((TILE, BLOCK), tl.float32)", "tl.zeros((TILE, STEP), tl.float32)"),
        ("range(low // BLOCK, tl.cdiv(high, BLOCK))", "range(low // STEP, tl.cdiv(high, STEP))"),
        (
            "slot * blocks + block) * BLOCK + j",
            "slot * blocks + block * STEP // BLOCK) * BLOCK + block * STEP % BLOCK + j",
        ),
        ("seen = block * BLOCK + j", "seen = block * STEP + j"),
    ],
    "no mask": [('tl.where(visible, scores, float("-inf"))', "scores")],
}


def same_alone(attend: Callable[..., torch.Tensor], device: str) -> bool:
    """Whether rows of a long sequence, beside a longer one, are right, and have the bits that they have alone."""
    traits = AttentionTraits(0.25)
    maker = torch.Generator().manual_seed(3)
    lengths = (330, 600)
    queries = [torch.randn(n, 2, 16, generator=maker).to(device) for n in lengths]
    held = [tuple(torch.randn(n, 1, 16, generator=maker).to(device) for _ in range(2)) for n in lengths]
    cache = Cache.of(held, 0)
    found, _ = run(queries, [(0, 326, 4), (1, 590, 10)], cache, traits, attend)
    for i in range(4):
        if not torch.allclose(found[i].double(), exactly(queries[0][326 + i], *held[0], 326 + i, traits), atol=2e-5):
            return False
        if not torch.equal(run(queries, [(0, 326 + i, 1)], cache, traits, attend)[0][0], found[i]):
            return False
    return True


@pytest.mark.parametrize("name", ["", *MUTATIONS])
def test_mutations_are_found(device: str, name: str, tmp_path: Path) -> None:
    """The kernel passes the check that each of its mutations fails."""
    source = Path(str(module.__file__)).read_text()
    for old, new in MUTATIONS.get(name, []):
        assert old in source
        source = source.replace(old, new)
    source = source.replace("SPLIT = 1024", f"SPLIT = {2 * BLOCK}")
    path = tmp_path / "mutated.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutated_{abs(hash(name))}", path)
    assert spec is not None
    assert spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    assert same_alone(mutated.attend, device) == (not name)
