"""The compiled attention is taken where it was built for this processor, and done without elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.examples import examples
from helpers.torch_passes import decoders
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine
from detgen.kernels import compiled
from detgen.kernels.attention import BLOCK, AttentionTraits, attend_blocks, attend_fused
from detgen.kernels.compiled import attend_compiled, build, can_attend, lay_out
from detgen.kernels.probe import same_bits
from detgen.passes.packing import FREE_SHAPES, Window, Windows, pack

CPU = torch.device("cpu")
BUILT = pytest.mark.skipif(build() is None, reason="the compiled attention was not built")


@BUILT
def test_what_it_takes() -> None:
    assert can_attend(CPU, torch.bfloat16, 64, 128)
    assert not can_attend(CPU, torch.float16, 64)
    assert not can_attend(CPU, torch.float32, 64, 24)
    assert not can_attend(torch.device("meta"), torch.float32, 64)


def laid_out(*spans: tuple[int, int, int], group: int = 1) -> torch.Tensor:
    """Windows (slot, start, tokens) for the compiled attention."""
    slots, starts, lengths = np.array(spans).T
    return lay_out(slots, starts, lengths, group)


def test_other_sizes_go_to_the_fused_kernel() -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, 2, 24, generator=g) for n in (4, 2 * BLOCK, 2 * BLOCK))
    packed = pack(Windows.of([Window(0, 60, [0] * 4, 0)]), FREE_SHAPES, np.zeros((1, 1), int), BLOCK, 1, CPU)
    hidden = torch.arange(BLOCK) > torch.arange(60, 64)[:, None]
    mask = torch.zeros(1, 1, 4, BLOCK).masked_fill(hidden, -torch.inf)
    want = attend_fused(q.transpose(0, 1)[None], k[None, :BLOCK], v[None, :BLOCK], mask, AttentionTraits(0.2))
    assert same_bits(packed.attend(q, k, v, AttentionTraits(0.2)), want[0].transpose(0, 1).contiguous())


@given(
    spans=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=9),
    group=st.integers(1, 80),
)
def test_pieces(spans: list[tuple[int, int]], group: int) -> None:
    """Each row of each window is in one piece, of at most 64 query rows or one token, the longest first."""
    found = laid_out(*((slot, *span) for slot, span in enumerate(spans)), group=group)
    rows = [(row + i, slot, start + i) for slot, start, tokens, row in found.tolist() for i in range(tokens)]
    places = [(slot, p) for slot, (start, tokens) in enumerate(spans) for p in range(start, start + tokens)]
    assert sorted(rows) == [(row, *place) for row, place in enumerate(places)]
    assert all(tokens == 1 or tokens * group <= 64 for tokens in found[:, 2].tolist())
    work = [(tokens + 1) * (start + tokens) for _, start, tokens, _ in found.tolist()]
    assert work == sorted(work, reverse=True)


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(30)
@given(
    size=st.sampled_from([16, 64, 80, 128]),
    values=st.sampled_from([16, 64, 96]),
    group=st.sampled_from([1, 2, 5]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 30, 200]),
    turned=st.booleans(),
)
def test_head_sizes_and_layouts(
    dtype: torch.dtype,
    size: int,
    values: int,
    group: int,
    softcap: float | None,
    window: int | None,
    turned: bool,
) -> None:
    """Any multiples of 16, queries as slices of more or heads first: the values of the reference."""
    g = torch.Generator().manual_seed(size + values)
    k = torch.randn(6 * BLOCK, 3, size, generator=g).to(dtype)
    v = torch.randn(6 * BLOCK, 3, values, generator=g).to(dtype)
    q = torch.randn(9, 3 * group + 1, size, generator=g).to(dtype)
    if turned:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    q = q[:, :-1]
    traits = AttentionTraits(size**-0.5, window, softcap)
    tables = torch.tensor([[4, 1, 0], [5, 2, 3]])
    out = attend_compiled(q, k, v, tables, laid_out((1, 126, 5), (0, 63, 2), group=group), traits)
    assert out[7:].eq(0).all(), "padding"
    for slot, start, first, end in ((1, 126, 0, 5), (0, 63, 5, 7)):
        own_k, own_v = (x.view(6, BLOCK, 3, -1)[tables[slot]].view(1, 3 * BLOCK, 3, -1) for x in (k, v))
        at = torch.arange(start, start + end - first).repeat_interleave(group)[:, None]
        visible = (torch.arange(3 * BLOCK) <= at) & (torch.arange(3 * BLOCK) > at - (window or BLOCK * 9))
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
        rows = q[first:end].unflatten(1, (3, group)).transpose(0, 1).flatten(1, 2)[None]
        want = attend_blocks(rows, own_k, own_v, mask, traits)[0].view(3, end - first, group, values).transpose(0, 1)
        error = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[first:end], want.flatten(1, 2), rtol=error, atol=error)


@BUILT
def test_values_are_summed_from_the_first_key_to_the_last() -> None:
    """Of queries that weigh all keys alike, so that the sum is plain; neither pages nor pieces divide it."""
    v = torch.randn(4 * BLOCK, 1, 16, generator=torch.Generator().manual_seed(6))
    tables = torch.tensor([[2, 0, 3]])
    order = torch.cat([torch.arange(page * BLOCK, (page + 1) * BLOCK) for page in tables[0].tolist()])
    out = attend_compiled(torch.zeros(70, 1, 16), v, v, tables, laid_out((0, 100, 70)), AttentionTraits(1.0))
    total = torch.zeros(1, 16)
    for position, key in enumerate(order[:170].tolist()):
        total = total + v[key]
        if position >= 100:
            assert same_bits(out[position - 100], total / (position + 1))


@BUILT
def test_a_row_that_is_no_number_stays_so() -> None:
    """A broken model's NaN is not lost, and stays in its row, whichever rows stand beside it."""
    for broken in range(7):
        q, k = torch.ones(7, 1, 16), torch.ones(BLOCK, 1, 16)
        q[broken, 0, 5] = torch.nan
        table = torch.zeros(1, 1, dtype=torch.int64)
        out = attend_compiled(q, k, k, table, laid_out((0, 3, 7)), AttentionTraits(1.0))
        assert out.isnan().any(-1)[:, 0].tolist() == [row == broken for row in range(7)]


@BUILT
def test_its_name_is_that_of_the_build() -> None:
    _, name = compiled._library()
    assert name == build()
    assert re.fullmatch("compiled [0-9a-f]{12}", name)


def test_without_it(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes an attention of torch's operators, says so, and gives the same text but for rounding."""
    prompt = "def add(a, b):\n"
    usual = engines(drafter="none", batch_size=1).generate([prompt], max_tokens=8)[0]
    monkeypatch.setattr(compiled, "_library", lambda: None)
    with decoders("lean"):
        engine = Engine(drafter="none", batch_size=1, kv_memory=16 << 20)
    assert engine.profile()["attention"] in ("fused", "blocks")
    assert engine.generate([prompt], max_tokens=8)[0].text == usual.text
