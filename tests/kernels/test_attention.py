"""Attention of packed rows: the right values, and the same bits whatever stands beside a row."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import BLOCK, Attend, AttentionTraits, attend_blocks, attend_fused
from detgen.kernels.compiled import attend_compiled, build
from detgen.kernels.probe import key_lengths, same_bits
from detgen.passes.packing import Shapes, Window, pack
from detgen.passes.probing import _TILE_ROWS as TILE_ROWS

SLOTS, SLOT_SIZE, KV_HEADS = 5, 640, 2
CPU = torch.device("cpu")
BUILT = pytest.mark.skipif(build() is None, reason="the compiled attention was not built")
ALL = pytest.mark.parametrize("attend", [attend_fused, attend_blocks, pytest.param(attend_compiled, marks=BUILT)])


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Softmax attention in float64: q [rows, size], k and v [keys, size], visible bool [rows, keys]."""
    scores = q.double() @ k.double().T * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1) @ v.double()


@ALL
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 50])
def test_values(attend: Attend, softcap: float | None, window: int | None) -> None:
    """All implementations compute softmax attention, soft-capped and windowed too."""
    g = torch.Generator().manual_seed(0)
    rows, keys, size = 24, 5 * BLOCK, 16
    q = torch.randn(3, KV_HEADS, rows, size, generator=g)
    k, v = (torch.randn(3, keys, KV_HEADS, size, generator=g) for _ in range(2))
    at = torch.randint(0, keys, (3, rows, 1), generator=g)
    all_keys = torch.arange(keys)
    visible = (all_keys <= at) if window is None else (all_keys <= at) & (all_keys > at - window)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[:, None]
    out = attend(q, k, v, mask, AttentionTraits(0.3, softcap=softcap))
    assert out.shape == q.shape
    for slot in range(3):
        for head in range(KV_HEADS):
            want = naive(q[slot, head], k[slot, :, head], v[slot, :, head], visible[slot], 0.3, softcap)
            torch.testing.assert_close(out[slot, head].double(), want, rtol=1e-5, atol=1e-6)


@functools.cache
def buffer(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [slots, slot_size, kv_heads, size] of a full cache."""
    g = torch.Generator().manual_seed(1)
    shape = (SLOTS, SLOT_SIZE, KV_HEADS, size)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


@functools.cache
def queries(size: int, group: int) -> torch.Tensor:
    """Queries [slots, slot_size, kv_heads, group, size] of every position."""
    return torch.randn(SLOTS, SLOT_SIZE, KV_HEADS, group, size, generator=torch.Generator().manual_seed(2))


@functools.cache
def allowed(attend: Attend, size: int) -> Shapes | None:
    """Shapes that detgen would hold tiles of this attention to on this machine; None if it would not use it."""
    for rows in TILE_ROWS:
        if lengths := key_lengths(attend, KV_HEADS, size, torch.float32, CPU, rows):
            return Shapes(rows=(1, 512), dense=True, tile_rows=rows, key_lengths=lengths, attend=attend)
    return None


def shapes(attend: Attend, size: int) -> Shapes:
    """Those shapes; skips the test if there are none."""
    return allowed(attend, size) or pytest.skip("not row-invariant on this machine, so detgen does not use it")


def run(windows: list[Window], like: Shapes, size: int, group: int, window: int | None) -> list[torch.Tensor]:
    """Attention of the windows' rows, packed into one pass: [tokens, kv_heads, group, size] a window."""
    packed = pack(windows, like, SLOT_SIZE, SLOTS * SLOT_SIZE, group, CPU)
    q = torch.zeros(len(packed.ids), KV_HEADS, group, size)
    at = 0
    for w in windows:
        q[at : at + len(w.tokens)] = queries(size, group)[w.slot, w.start : w.start + len(w.tokens)]
        at += len(w.tokens)
    k, v = buffer(size)

    def read(first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return k[first:last, :length], v[first:last, :length]

    out = packed.tiles.attend(q.flatten(1, 2), KV_HEADS, read, like.attend, AttentionTraits(size**-0.5, window))
    flat = out.view(len(q), KV_HEADS, group, size)
    ends = [sum(len(x.tokens) for x in windows[: i + 1]) for i in range(len(windows))]
    return [flat[end - len(w.tokens) : end] for w, end in zip(windows, ends, strict=True)]


@functools.cache
def alone(attend: Attend, size: int, group: int, window: int | None, slot: int, position: int) -> torch.Tensor:
    """A row in a pass of its own, by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row = run([Window(slot, position, [0], 1)], shapes(attend, size), size, group, window)[0][0]
    torch.set_num_threads(threads)
    return row


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


@ALL
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 2), (32, 3)])
@examples(20)
@given(windows=packings(), window=st.sampled_from([None, 40]))
def test_a_row_is_the_same_in_every_packing(
    attend: Attend, size: int, group: int, windows: list[Window], window: int | None
) -> None:
    """Width, place, slots, neighbours, the neighbours' key lengths and threads do not change a bit of a row."""
    for w, out in zip(windows, run(windows, shapes(attend, size), size, group, window), strict=True):
        width = len(w.tokens)
        for i in {*range(0, width, 7), width - 1}:
            assert same_bits(out[i], alone(attend, size, group, window, w.slot, w.start + i)), (w.slot, i)


@pytest.mark.parametrize(("size", "group"), [(64, 1), (64, 2), (16, 3), (128, 5)])
@ALL
def test_every_width(attend: Attend, size: int, group: int) -> None:
    """A window of each width from 1 to 128 gives each of its rows the bits that the widest gives it."""
    like = shapes(attend, size)
    widest = run([Window(1, 7, [0] * 128, 0)], like, size, group, None)[0]
    wrong = [
        n
        for n in range(1, 128)
        if not same_bits(run([Window(1, 7, [0] * n, 0)], like, size, group, None)[0], widest[:n])
    ]
    assert not wrong, f"widths {wrong}"


@ALL
def test_packed_rows_have_the_right_values(attend: Attend) -> None:
    """Rows land where they belong: each one's attention is that of its own slot and position."""
    size, group = 32, 2
    windows = [Window(3, 0, [0] * 3, 0), Window(0, 500, [0] * 40, 0), Window(4, 90, [0], 0), Window(2, 63, [0] * 2, 0)]
    k, v = buffer(size)
    for window in (None, 40):
        for w, out in zip(windows, run(windows, shapes(attend, size), size, group, window), strict=True):
            for i in range(len(w.tokens)):
                at = w.start + i
                first = 0 if window is None else max(0, at - window + 1)
                for head in range(KV_HEADS):
                    own = slice(first, at + 1)
                    q = queries(size, group)[w.slot, at, head]
                    visible = torch.ones(group, at + 1 - first, dtype=torch.bool)
                    want = naive(q, k[w.slot, own, head], v[w.slot, own, head], visible, 1 / math.sqrt(size), None)
                    torch.testing.assert_close(out[i, head].double(), want, rtol=1e-5, atol=1e-6)


@ALL
def test_masked_entries_weigh_nothing(attend: Attend) -> None:
    """What stands behind a row's position, however large, has no influence on a bit."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 4, 16, generator=g)
    k, v = (torch.randn(1, 2 * BLOCK, 1, 16, generator=g) for _ in range(2))
    mask = torch.zeros(1, 1, 4, 2 * BLOCK)
    mask[..., 70:] = -torch.inf
    clean = attend(q, k, v, mask, AttentionTraits(0.25))
    k[:, 70:], v[:, 70:] = 1e4, -1e30
    assert same_bits(clean, attend(q, k, v, mask, AttentionTraits(0.25)))


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(30)
@given(
    rows=st.integers(1, 150),
    blocks=st.integers(1, 12),
    size=st.sampled_from([16, 64, 80, 128]),
    values=st.sampled_from([16, 64, 96]),
    softcap=st.sampled_from([None, 2.0]),
    data=st.data(),
)
def test_compiled_rows_have_an_order_of_their_own(
    dtype: torch.dtype, rows: int, blocks: int, size: int, values: int, softcap: float | None, data: st.DataObject
) -> None:
    """The bits of a row are those of a tile of this row alone that reads no block more than it must."""
    g = torch.Generator().manual_seed(rows + 200 * blocks)
    keys = blocks * BLOCK
    q = torch.randn(2, 3, rows, size, generator=g).to(dtype)
    k = torch.randn(2, keys, 3, size, generator=g).to(dtype)
    v = torch.randn(2, keys, 3, values, generator=g).to(dtype)
    at = torch.randint(0, keys, (2, rows, 1), generator=g)
    reach = data.draw(st.integers(1, keys))
    visible = (torch.arange(keys) <= at) & (torch.arange(keys) > at - reach)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[:, None].to(dtype)
    traits = AttentionTraits(size**-0.5, softcap=softcap)
    whole = attend_compiled(q, k, v, mask, traits)
    slot, row = data.draw(st.integers(0, 1)), data.draw(st.integers(0, rows - 1))
    length = (int(at[slot, row]) // BLOCK + 1) * BLOCK
    one = attend_compiled(
        q[slot : slot + 1, :, row : row + 1],
        k[slot : slot + 1, :length],
        v[slot : slot + 1, :length],
        mask[slot : slot + 1, :, row : row + 1, :length],
        traits,
    )
    assert same_bits(one[0, :, 0], whole[slot, :, row])
    want = naive(
        q[slot, 0, row : row + 1], k[slot, :, 0], v[slot, :, 0], visible[slot, row : row + 1], size**-0.5, softcap
    )
    error = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole[slot, 0, row : row + 1].double(), want, rtol=error, atol=error)
