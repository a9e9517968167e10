"""Rotations and attention in Triton have the bits of the program's interpreter, in any pages and sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples, usual
from helpers.triton_steps import NONE, alike, numbers, on
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import lay_out
from detgen.kernels.c.quantizing import STORAGE
from detgen.kernels.triton import attend
from detgen.kernels.triton.runner import TritonRunner
from detgen.program import interpreter, steps
from detgen.program.arrays import same_bits
from detgen.program.interpreter import Interpreter
from detgen.program.operands import PAGE, SECTION_BLOCKS, Buffer, Cache, name_of
from detgen.program.program import Program
from detgen.program.rows import Rows


@examples(10)
@given(
    heads=st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 2, 8), (3, 3, 20)]),
    turned=st.sampled_from([0, 2, 8]),
    interleaved=st.booleans(),
    last=st.booleans(),
    alone=st.booleans(),
    within=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rotation(
    device: str,
    heads: tuple[int, int, int],
    turned: int,
    interleaved: bool,
    last: bool,
    alone: bool,
    within: bool,
    dtype: torch.dtype,
) -> None:
    """In place, and what is stored, bounded and rounded; of queries alone, nothing is, nor are values in keys."""
    count, kv_heads, size = heads
    qkv = Buffer("qkv", (count + (0 if alone else kv_heads if within else 2 * kv_heads)) * size)
    x = numbers(1, 5, qkv.width)
    x[1, 0 if alone else count * size], x[2, -1] = torch.nan, torch.inf
    if not alone:
        x[3, count * size + 1] = -1e30
    angles = numbers(2, 40, turned // 2) if turned else None
    cosines, sines = (None if angles is None else f(angles) for f in (torch.cos, torch.sin))
    places = torch.tensor([3, 70, 64, 127, 0])
    rows = Rows(places, torch.tensor([0, 39, 4, 7, 1]), places, places, NONE, NONE)
    kept = []
    for where in ("cpu", device):
        keys, values = (torch.zeros(3, kv_heads, *of, dtype=dtype) for of in ((size, PAGE), (PAGE, size)))
        sizes = {"heads": count, "kv_heads": kv_heads, "size": size, "values": size}
        cache = Cache(**sizes, keys=keys, kept=None if within else values, storage=STORAGE[name_of(dtype)])
        step = steps.Rotate(
            name="rotated", qkv=qkv, cache=cache, turned=turned, interleaved=interleaved, cosines=cosines, sines=sines,
            factors=numbers(3, 40) if last else None, last=last,
        )  # fmt: skip
        program, given = Program(qkv), {qkv: x.clone().to(where if kept else "cpu")}
        moved = on(device, step) if kept else step
        program.add(moved)
        if kept:
            broken = TritonRunner(program).run(rows.to(device), given).bool().cpu()
        else:
            broken = Interpreter(program).run(rows, given)
        stored = [x.cpu() for x in (moved.cache.keys, moved.cache.kept) if x is not None]
        kept.append((given[qkv].cpu(), *stored, broken))
    assert all(same_bits(a, b) for a, b in zip(*kept, strict=True))
    assert kept[0][-1].tolist() == [False, last and not alone, within and last and not alone, False, False]
    assert kept[0][1].any() != alone


class Windows(NamedTuple):
    """Windows of a slot each, some of one token, whose pages lie anywhere."""

    starts: list[int]
    lengths: list[int]

    def attend(
        self,
        heads: tuple[int, int, int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        within: bool = False,
        **how: Any,
    ) -> Case:
        """A step of query heads, key heads and their size, and what it reads; values may be within keys."""
        count, kv_heads, size = heads
        slots, ends = len(self.starts), [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
        blocks = -(-max(ends) // PAGE)
        pages = np.random.default_rng(seed).permutation(slots * blocks)
        tables = torch.from_numpy(pages.reshape(slots, blocks))
        positions = torch.cat([torch.arange(*span) for span in zip(self.starts, ends, strict=True)])
        pieces = lay_out(np.arange(slots), np.array(self.starts), np.array(self.lengths), count // kv_heads)
        keys = numbers(2, slots * blocks, kv_heads, size, PAGE).to(dtype)
        values = numbers(3, slots * blocks, kv_heads, PAGE, 6).to(dtype)
        sizes = {"heads": count, "kv_heads": kv_heads, "size": size, "values": 6}
        cache = Cache(**sizes, keys=keys, kept=None if within else values, storage=STORAGE[name_of(dtype)])
        qkv, to = Buffer("qkv", cache.row), Buffer("to", count * 6)
        step = steps.Attend(name="attention", qkv=qkv, cache=cache, to=to, **{"scale": 0.2} | how)
        rows = Rows(positions, positions, positions, positions, tables, pieces)
        return Case(step, rows, {qkv: numbers(1, len(positions), qkv.width), to: torch.zeros(len(positions), to.width)})


class Case(NamedTuple):
    """A step of attention, the rows, and what is in its buffers."""

    step: steps.Attend
    rows: Rows
    buffers: dict[Buffer, torch.Tensor]

    def put(self, x: float, entries: slice | int, *places: int, values: bool = False) -> None:
        """Change entries of all keys, or values, at places of the first slot."""
        for place in places:
            page, at = int(self.rows.tables[0, place // PAGE]), place % PAGE
            if values:
                self.step.cache.kept[page, :, at, entries] = x
            else:
                self.step.cache.keys[page, :, entries, at] = x

    def results(self, device: str) -> torch.Tensor:
        """What both give, [rows, heads * values]."""
        return alike(device, self.rows, self.buffers, self.step)[self.step.to]


@pytest.fixture
def section(device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The keys of a section: a quarter of them in the interpreter, which takes long for each."""
    if device != "cpu":
        return SECTION
    for reader in (attend, interpreter):
        monkeypatch.setattr(reader, "SECTION_BLOCKS", SECTION_BLOCKS // 4)
    monkeypatch.setattr(attend, "_BLOCKS", SECTION_BLOCKS // 4)
    return SECTION // 4


@examples(8)
@given(
    heads=st.sampled_from([(1, 1, 8), (4, 2, 8), (6, 2, 12), (8, 1, 8), (70, 1, 10)]),
    within=st.booleans(),
    window=st.sampled_from([0, 0, 1, 20, 100]),
    chunk=st.sampled_from([0, 0, 33, 64]),
    softcap=st.sampled_from([0.0, 3.0]),
    length=st.integers(1, 19),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sinks=st.booleans(),
    slopes=st.booleans(),
)
def test_attention(
    device: str,
    heads: tuple[int, int, int],
    within: bool,
    window: int,
    chunk: int,
    softcap: float,
    length: int,
    seed: int,
    dtype: torch.dtype,
    sinks: bool,
    slopes: bool,
) -> None:
    """Windows at several places of sequences."""
    windows, how = Windows([0, 61, 130, 5], [length, 5, 1, 1]), {"window": window, "chunk": chunk, "softcap": softcap}
    for name in [name for name, has in {"sinks": sinks, "slopes": slopes}.items() if has]:
        how[name] = numbers(seed, heads[0]).abs()
    windows.attend(heads, seed, dtype, within=within, **how).results(device)


SECTION = SECTION_BLOCKS * PAGE
# Heads, and by how long a section is: where windows begin, and how they attend.
OVER_SECTIONS: list[tuple[tuple[int, int, int], Callable[[int], tuple[list[int], dict[str, Any]]]]] = [
    ((1, 1, 4), lambda n: ([n - 3, 2 * n - 2], {"scale": 1.3})),  # rows on both sides of where sections meet
    ((4, 2, 4), lambda n: ([n + 200], {"chunk": n - 6, "window": 230, "softcap": 0.7})),
    ((4, 2, 4), lambda n: ([n - 2], {"sinks": torch.tensor([0.0, -3.0, 9.0, torch.inf])})),
    ((20, 1, 9), lambda n: ([n - 2, 2 * n], {"within": True})),
    ((4, 2, 4), lambda n: ([n - 2, 2 * n], {"slopes": torch.tensor([0.5, 0.25, 0.01, 0.0])})),
    ((3, 1, 4), lambda n: ([n + 40], {"window": n - 76})),  # from the middle of a block of the section before
    ((4, 1, 4), lambda n: ([n + 70], {"window": 90, "softcap": 2.0})),
    ((3, 1, 4), lambda n: ([n + 94, 2 * n], {"chunk": n + 97})),  # begins among the rows, in the middle of a block
]


@pytest.mark.parametrize(("heads", "case"), usual(OVER_SECTIONS[:3], OVER_SECTIONS[3:]))
def test_sections_of_attention(
    device: str, section: int, heads: tuple[int, int, int], case: Callable[[int], tuple[list[int], dict[str, Any]]]
) -> None:
    starts, how = case(section)
    Windows(starts, [5] * len(starts)).attend(heads, **how).results(device)


def test_small_tiles_of_attention(device: str, section: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries of a program, as a GPU has them, and one query head at a time, or two, or three of six."""
    monkeypatch.setattr("detgen.kernels.triton.attend.tile", lambda _size, _most: 4)
    of_head = 4 * 6 * 2 * PAGE  # bytes of two sections of six rows
    several = ((1, (6, 2, 4)), (3 * of_head + 1, (6, 1, 6)))
    for most, heads in usual(several[1:], [*several, (2 * of_head, (6, 1, 6))]):
        monkeypatch.setattr("detgen.kernels.triton.attend._MOST", most)
        Windows([section - 2, 3], [5, 1]).attend(heads, window=120, within=heads[1] == 1).results(device)


@pytest.mark.parametrize("how", [{}, {"window": SECTION // 4 + 5}, {"chunk": 2 * SECTION // 4}])
@pytest.mark.parametrize("spread", [1, 2])
def test_programs_that_read_several_sections(
    device: str, section: int, monkeypatch: pytest.MonkeyPatch, how: dict[str, int], spread: int
) -> None:
    """Decoded tokens, of contexts of three sections and fewer, beside a window of several tokens and without it."""
    monkeypatch.setattr("detgen.kernels.triton.attend._PROGRAMS", 1)
    monkeypatch.setattr("detgen.kernels.triton.attend._LEAST_SPREAD", spread)
    for lengths in ([1, 1, 1], [1, 1, 5]):
        Windows([2 * section + 5, 3, section - 1], lengths).attend((4, 2, 4), **how).results(device)


def test_scores_that_are_not_finite(device: str, section: int) -> None:
    """Of a key, of a block and of a section, each -inf: they weigh nothing. A row that sees NaN or inf is NaN."""
    case = Windows([section + 200], [12]).attend((2, 1, 4), window=section + 20)
    qkv = case.buffers[case.step.qkv]
    qkv[:, 0] = 1e30  # of the first head
    case.put(0.0, 0, *range(section + 212))
    first = case.results(device)
    assert first.isfinite().all()
    case.put(-1e18, 0, *range(section), *range(section + 64, section + 128), section + 150)
    second = case.results(device)
    assert second.isfinite().all()
    assert not same_bits(first, second)
    for bad in (torch.nan, 1e18):
        case.put(bad, 0, 185)  # what the first five rows see
        found = case.results(device)[:, :6]
        assert found.isnan().all(1).tolist() == [True] * 5 + [False] * 7
        assert same_bits(found[5:], second[5:, :6])
        case.put(-1e18, 0, 185)
    case.put(-1e18, 0, *range(section + 212))
    assert case.results(device)[:, :6].isnan().all()


def test_what_is_not_seen_is_not_read(device: str) -> None:
    """A number that is not finite, in front of a row's window or behind its position, changes nothing."""
    case = Windows([90], [8]).attend((2, 1, 4), window=30)
    clean = case.results(device)
    for values in (False, True):
        case.put(torch.nan, slice(None), *range(64), 94, *range(98, 128), values=values)
    found = case.results(device)
    # Rows at 90 to 92 see what is in front of 64, those from 94 on what is there.
    assert found.isnan().all(1).tolist() == [True] * 3 + [False] + [True] * 4
    assert same_bits(found[3], clean[3])
