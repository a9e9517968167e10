"""Each kind of step, in each build, gives the bits of its plain reference, whatever the rows and the threads are."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from helpers.examples import examples
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.attention import lay_out
from detgen.kernels.bits import same_bits
from detgen.kernels.judging import Scores
from detgen.kernels.native import reference
from detgen.kernels.native.library import BUILDS, Rows, Runner, build
from detgen.kernels.native.panels import STORAGE, joined, panels, stacked
from detgen.kernels.native.quantizing import narrowed
from detgen.program import steps
from detgen.program.program import Program
from detgen.program.steps import LOGIT_BLOCK, PAGE, SCORED, Activation, Buffer, Cache, Into, Storage

ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: reference.silu,
    Activation.GELU_TANH: reference.gelu_tanh,
    Activation.GELU: reference.gelu,
    Activation.RELU: reference.relu,
}
FUNCTIONS = {
    **ACTIVATIONS,
    Activation.SIGMOID: reference.sigmoid,
    Activation.TANH: reference.tangent,
    Activation.ROOT: lambda x: reference.root(x.abs()),
    Activation.RECIPROCAL_ROOT: lambda x: 1 / reference.root(x.abs()),
}

if not any(build(name) for name in BUILDS):
    pytest.skip("the pass was not built", allow_module_level=True)


@pytest.fixture(params=BUILDS, scope="module")
def found(request: pytest.FixtureRequest) -> ctypes.CDLL:
    library = build(request.param)
    if library is None:
        pytest.skip(f"this processor has no {request.param}, or it was not built")
    return library


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Of several magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape, generator=g))


def program(*made: steps.Step, given: tuple[Buffer, ...]) -> Program:
    """Of some steps."""
    found = Program(*given)
    for step in made:
        found.add(step)
    return found


def run(library: ctypes.CDLL, buffers: dict[Buffer, torch.Tensor], *made: steps.Step, threads: int = 1) -> None:
    """A pass without attention whose buffers are given; all rows are wanted, in reverse."""
    along = torch.arange(len(next(iter(buffers.values()))))
    none = torch.zeros(0, 4, dtype=torch.int64)
    with using(threads):
        rows = Rows(along, along, along, along.flip(0), none, none)
        Runner(library, program(*made, given=tuple(buffers))).run(rows, buffers)


storages = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
PARTIAL = st.one_of(st.integers(1, 40), st.integers(120, 135), st.sampled_from([32, 64, 160, 256, 384, 390]))


@examples(40)
@given(
    rows=st.integers(1, 30) | st.sampled_from([96, 97, 131]),
    inputs=PARTIAL,
    outputs=st.integers(1, 70),
    storage=storages,
    bits=st.sampled_from([0, 0, 8, 4]),
    activation=st.sampled_from(list(ACTIVATIONS)),
    biased=st.booleans(),
    add=st.booleans(),
    factor=st.sampled_from([1.0, 0.3]),
    threads=st.integers(1, 3),
)
def test_linear(
    found: ctypes.CDLL,
    rows: int,
    inputs: int,
    outputs: int,
    storage: torch.dtype,
    bits: int,
    activation: Activation,
    biased: bool,
    add: bool,
    factor: float,
    threads: int,
) -> None:
    x, weight = numbers(1, rows, inputs), (numbers(2, outputs, inputs) * inputs**-0.5).to(storage)
    bias = numbers(3, outputs)
    packed = joined([weight], [bias] if biased else [], bits)
    read, to = Buffer("x", inputs), Buffer("to", outputs)
    into = Into(to, add=add, factor=factor)
    step = steps.Linear(name="step", x=read, to=into, weight=packed, activation=activation)
    before = numbers(4, rows, outputs)
    out = before.clone()
    run(found, {read: x, to: out}, step, threads=threads)
    want = ACTIVATIONS[activation](reference.linear(x, narrowed(weight, bits), bias if biased else None))
    want = want * torch.tensor(factor) if factor != 1 else want
    assert same_bits(out, before + want if add else want)


@examples(10)
@given(rows=st.integers(1, 20), inner=st.integers(1, 50), biased=st.booleans(), storage=storages)
def test_gated_linear(found: ctypes.CDLL, rows: int, inner: int, biased: bool, storage: torch.dtype) -> None:
    x, gate, up = numbers(1, rows, 24), numbers(2, inner, 24).to(storage), numbers(3, inner, 24).to(storage)
    gate_bias, up_bias = numbers(4, inner), numbers(5, inner)
    packed = joined([gate, up], [gate_bias, up_bias] if biased else [], gated=True)
    read, to, out = Buffer("x", 24), Buffer("to", inner), torch.empty(rows, inner)
    activation = Activation.SILU
    step = steps.Linear(name="step", x=read, to=Into(to), weight=packed, gated=True, activation=activation)
    run(found, {read: x, to: out}, step)
    gates = reference.linear(x, gate, gate_bias if biased else None)
    assert same_bits(out, reference.silu(gates) * reference.linear(x, up, up_bias if biased else None))


def test_linear_of_any_rows(found: ctypes.CDLL) -> None:
    """Every row count gives a row the same bits."""
    x, packed = numbers(1, 512, 40), panels([numbers(2, 64, 40)])
    read, to, want = Buffer("x", 40), Buffer("to", 64), torch.empty(512, 64)
    step = steps.Linear(name="step", x=read, to=Into(to), weight=packed)
    run(found, {read: x, to: want}, step, threads=2)
    for rows in range(1, 512):
        out = torch.empty(rows, 64)
        run(found, {read: x[512 - rows :].clone(), to: out}, step)
        assert same_bits(out, want[512 - rows :])


def test_linear_softcap(found: ctypes.CDLL) -> None:
    x, weight = numbers(1, 5, 20), numbers(2, 37, 20)
    read, to, out = Buffer("x", 20), Buffer("to", 37), torch.empty(5, 37)
    run(
        found,
        {read: x, to: out},
        steps.Linear(name="step", x=read, to=Into(to, factor=0.5), weight=panels([weight]), softcap=30.0),
    )
    assert same_bits(out, reference.tangent(reference.linear(x, weight) * 0.5 / 30.0) * 30.0)


@examples(25)
@given(
    rows=st.integers(1, 9) | st.sampled_from([96, 97]),
    width=st.integers(1, 40) | st.sampled_from([127, 128, 129, 300, 2100]),
    softcap=st.sampled_from([0.0, 30.0]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 20.0]),
    special=st.sampled_from([None, -torch.inf, torch.inf, torch.nan]),
    threads=st.integers(1, 3),
)
def test_scores(
    found: ctypes.CDLL, rows: int, width: int, softcap: float, spread: float, special: float | None, threads: int
) -> None:
    """They are those of the logits that are not stored, bit for bit; in rows that are not finite, they say so."""
    x, weight = numbers(1, rows, 20) * spread, numbers(2, width, 20)
    if special is not None:
        weight[torch.rand(width, generator=torch.Generator().manual_seed(width)) < 0.1, 3] = special
        x[:, 3] = 1.0
    read, to, out = Buffer("x", 20), Buffer("to", SCORED), torch.empty(rows, SCORED)
    blocks = Buffer("blocks", SCORED * -(-width // LOGIT_BLOCK))
    run(
        found,
        {read: x, to: out},
        steps.ScoredLinear(name="logits", x=read, to=blocks, weight=panels([weight]), factor=0.5, softcap=softcap),
        steps.Score(name="scores", x=blocks, to=to),
        threads=threads,
    )
    logits = reference.linear(x, weight) * 0.5
    if softcap:
        logits = reference.tangent(logits / softcap) * softcap
    tops = logits.amax(-1)
    sound = tops.isfinite().numpy()
    scores = Scores.of(out)
    assert np.array_equal(scores.finite, sound)
    assert np.array_equal(scores.tokens[sound], logits.numpy().argmax(-1)[sound])
    two = torch.cat([logits, torch.full((rows, 1), -torch.inf)], 1).double().topk(2).values
    assert np.array_equal(scores.leads[sound], (two[:, 0] - two[:, 1]).numpy()[sound])
    best = reference.log_softmax(logits).gather(-1, logits.argmax(-1)[:, None])[:, 0]
    assert same_bits(torch.from_numpy(scores.logprobs)[sound], best[sound])


@examples(15)
@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 70),
    vectors=st.integers(1, 3),
    centred=st.booleans(),
    weighted=st.booleans(),
    biased=st.booleans(),
    add=st.booleans(),
)
def test_norm(
    found: ctypes.CDLL, rows: int, size: int, vectors: int, centred: bool, weighted: bool, biased: bool, add: bool
) -> None:
    x, weight, bias = numbers(1, rows, vectors * size), numbers(2, vectors, size), numbers(3, vectors, size)
    read, to = Buffer("x", vectors * size), Buffer("to", vectors * size)
    step = steps.Norm(
        name="step",
        x=read,
        to=Into(to, add=add),
        vectors=vectors,
        size=size,
        weight=weight if weighted or biased else None,
        bias=bias if biased else None,
        own=weighted or biased,
        epsilon=1e-5,
        centred=centred,
    )
    out = torch.ones(rows, vectors * size)
    run(found, {read: x, to: out}, step, threads=2)
    args = (weight if weighted or biased else None, bias if biased else None)
    want = reference.norm(x.view(rows, vectors, size), *args, 1e-5, centred=centred).view(rows, -1)
    assert same_bits(out, 1 + want if add else want)


def test_norm_of_some_heads(found: ctypes.CDLL) -> None:
    """In place, by one weight for all of them; the rest of the row stays as it is."""
    x, weight, qkv = numbers(1, 5, 30), numbers(2, 8), Buffer("qkv", 30)
    out = x.clone()
    norm = steps.Norm(
        name="step", x=qkv, to=Into(qkv), at=4, vectors=3, size=8, weight=weight, epsilon=1e-5, centred=False
    )
    run(found, {qkv: out}, norm)
    want = x.clone()
    want[:, 4:28] = reference.norm(x[:, 4:28].reshape(5, 3, 8), weight, None, 1e-5, centred=False).view(5, 24)
    assert same_bits(out, want)


@examples(10)
@given(rows=st.integers(1, 40), width=st.integers(1, 40), storage=storages, factor=st.sampled_from([1.0, 5.5]))
def test_embedding(found: ctypes.CDLL, rows: int, width: int, storage: torch.dtype, factor: float) -> None:
    """By token, zeros for a token below 0; then a table of positions is added."""
    table, places = numbers(1, 50, width).to(storage), numbers(2, 50, width)
    to, out = Buffer("to", width), torch.empty(rows, width)
    made = program(
        steps.Embed(name="tokens", table=table, storage=STORAGE[storage], to=Into(to, factor=factor)),
        steps.EmbedPositions(name="places", table=places, storage=Storage.FLOAT, offset=2, to=Into(to, add=True)),
        given=(),
    )
    ids, along = torch.arange(rows) - 1, torch.arange(rows)
    none = torch.zeros(0, 4, dtype=torch.int64)
    Runner(found, made).run(Rows(ids, along, along, along, none, none), {to: out})
    read = table[ids.clamp(min=0)].float().masked_fill((ids < 0)[:, None], 0)
    assert same_bits(out, (read * torch.tensor(factor) if factor != 1 else read) + places[along + 2])


@examples(20)
@given(rows=st.integers(1, 30), width=st.integers(1, 70), kind=st.sampled_from(Activation), threads=st.integers(1, 3))
def test_functions_of_entries(found: ctypes.CDLL, rows: int, width: int, kind: Activation, threads: int) -> None:
    x, out = numbers(1, rows, width), torch.empty(rows, width)
    x = x.abs() if kind >= Activation.ROOT else x
    read, to = Buffer("x", width), Buffer("to", width)
    run(found, {read: x, to: out}, steps.Activate(name="step", x=read, to=Into(to), function=kind), threads=threads)
    assert same_bits(out, FUNCTIONS[kind](x))


@examples(20)
@given(rows=st.integers(1, 30), width=st.integers(1, 70), threads=st.integers(1, 3))
def test_softmax_and_sum(found: ctypes.CDLL, rows: int, width: int, threads: int) -> None:
    x, chances, totals = numbers(1, rows, width), torch.empty(rows, width), torch.empty(rows, 1)
    read, one, other = Buffer("x", width), Buffer("chances", width), Buffer("totals", 1)
    made = steps.Softmax(name="softmax", x=read, to=one), steps.Sum(name="sum", x=read, to=other)
    run(found, {read: x, one: chances, other: totals}, *made, threads=threads)
    assert same_bits(chances, reference.softmax(x))
    assert same_bits(totals[:, 0].contiguous(), reference.total(x))


def test_copies(found: ctypes.CDLL) -> None:
    """Of the wanted rows, or of all, added."""
    x, out, chosen = numbers(1, 9, 21), torch.ones(9, 21), torch.empty(9, 21)
    read, to, picked = Buffer("x", 21), Buffer("to", 21), Buffer("picked", 21)
    made = (
        steps.Copy(name="copied", x=read, to=Into(to, add=True, factor=2.0)),
        steps.Take(name="taken", x=read, to=picked),
    )
    run(found, {read: x, to: out, picked: chosen}, *made, threads=2)
    assert same_bits(out, 1 + 2 * x)
    assert same_bits(chosen, x.flip(0))


@examples(12)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 9)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    size=st.sampled_from([8, 16, 20, 48, 64]),
    values=st.sampled_from([8, 16, 36, 80]),
    turned=st.sampled_from([0, 4, 8]),
    interleaved=st.booleans(),
    window=st.sampled_from([0, 1, 30, 100]),
    softcap=st.sampled_from([0.0, 20.0]),
    chunk=st.sampled_from([0, 1, 24, 100]),
    threads=st.integers(1, 3),
)
def test_attention(
    found: ctypes.CDLL,
    spans: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    size: int,
    values: int,
    turned: int,
    interleaved: bool,
    window: int,
    softcap: float,
    chunk: int,
    threads: int,
) -> None:
    """Windows of several slots, whose pages are anywhere and hold what others left: rotated, stored and attended."""
    heads, blocks, slots = kv_heads * group, 3, len(spans)
    tables = torch.randperm(slots * blocks, generator=torch.Generator().manual_seed(1)).view(slots, blocks)
    keys, kept = numbers(2, slots * blocks, kv_heads, size, PAGE), numbers(3, slots * blocks * PAGE, kv_heads, values)
    angles = numbers(4, 200, max(turned // 2, 1))
    cosines, sines = angles.cos(), angles.sin()
    lengths = np.array([n for _, n in spans])
    positions = torch.tensor([p for start, n in spans for p in range(start, start + n)])
    slot = torch.from_numpy(np.repeat(np.arange(slots), lengths))
    places = tables[slot, positions // PAGE] * PAGE + positions % PAGE
    rows = len(positions)
    width = (heads + kv_heads) * size + kv_heads * values
    qkv, to = Buffer("qkv", width), Buffer("to", heads * values)
    cache = Cache(heads=heads, kv_heads=kv_heads, size=size, values=values, keys=keys, kept=kept)
    turns = {"turned": turned, "cosines": cosines, "sines": sines} if turned else {}
    made = program(
        steps.Rotate(name="rotated", qkv=qkv, cache=cache, interleaved=interleaved, last=True, **turns),
        steps.Attend(
            name="attended", qkv=qkv, cache=cache, to=to, scale=0.2, window=window, chunk=chunk, softcap=softcap
        ),
        given=(qkv,),
    )
    x, out = numbers(5, rows, width), torch.empty(rows, heads * values)
    given_rows = x.clone()
    pieces = lay_out(np.arange(slots), np.array([start for start, _ in spans]), lengths, group)
    laid_out = Rows(positions, positions, places, positions[:0], tables, pieces)
    with using(threads):
        broken = Runner(found, made).run(laid_out, {qkv: given_rows, to: out})
    assert not broken.any()
    q, k, v = x.split([heads * size, kv_heads * size, kv_heads * values], dim=1)
    q, k, v = q.view(rows, heads, size), k.view(rows, kv_heads, size), v.view(rows, kv_heads, values)
    if turned:
        angles = cosines[positions], sines[positions]
        q, k = (reference.rotate(y, *angles, interleaved=interleaved) for y in (q, k))
    flat = keys.permute(0, 3, 1, 2).reshape(-1, kv_heads, size)  # [positions, kv_heads, size]
    assert same_bits(flat[places].contiguous(), k.contiguous())
    assert same_bits(kept[places], v.contiguous())
    for row in range(rows):
        p = torch.arange(int(positions[row]) + 1)
        seen = tables[slot[row], p // PAGE] * PAGE + p % PAGE
        for head in range(heads):
            own = flat[seen, head // group], kept[seen, head // group]
            want = reference.attend(q[row, head], *own, 0.2, window, softcap, chunk)
            assert same_bits(out.view(rows, heads, values)[row, head], want)


def test_what_is_not_finite_stays_in_its_row(found: ctypes.CDLL) -> None:
    """Keys and values are stored bounded, and a row whose keys are broken is named."""
    keys, kept = torch.zeros(1, 1, 16, PAGE), torch.zeros(PAGE, 1, 16)
    qkv, to = Buffer("qkv", 48), Buffer("to", 16)
    cache = Cache(heads=1, kv_heads=1, size=16, values=16, keys=keys, kept=kept)
    made = program(
        steps.Rotate(name="rotated", qkv=qkv, cache=cache, last=True),
        steps.Attend(name="attended", qkv=qkv, cache=cache, to=to, scale=0.25),
        given=(qkv,),
    )
    x = numbers(1, 5, 48)
    sound = x.clone()
    x[2, 17], x[2, 18], x[2, 40], x[4, 47] = torch.nan, torch.inf, -torch.inf, torch.nan
    out, want = torch.empty(5, 16), torch.empty(5, 16)
    along, table = torch.arange(5), torch.zeros(1, 1, dtype=torch.int64)
    pieces = torch.tensor([[0, 0, 5, 0]])
    broken = Runner(found, made).run(Rows(along, along, along, along, table, pieces), {qkv: x, to: out})
    assert broken.tolist() == [False, False, True, False, False]
    assert keys.isfinite().all()
    assert kept.isfinite().all()
    Runner(found, made).run(Rows(along, along, along, along, table, pieces), {qkv: sound, to: want})
    assert same_bits(out[:2], want[:2])
    assert out[:2].isfinite().all()


@examples(10)
@given(
    rows=st.integers(1, 30) | st.just(110),
    experts=st.integers(2, 20),
    picks=st.integers(1, 4),
    inner=st.sampled_from([8, 16, 21, 40]),
    normalized=st.booleans(),
    storage=storages,
    threads=st.integers(1, 3),
    ties=st.booleans(),
)
def test_experts(
    found: ctypes.CDLL,
    rows: int,
    experts: int,
    picks: int,
    inner: int,
    normalized: bool,
    storage: torch.dtype,
    threads: int,
    ties: bool,
) -> None:
    """A row's experts add up as if it were alone, whoever takes them too."""
    picks, width = min(picks, experts), 24
    x, logits = numbers(1, rows, width), numbers(2, rows, experts)
    if ties:
        logits = logits.round()
    up, down = numbers(3, experts, 2 * inner, width).to(storage), numbers(4, experts, width, inner).to(storage)
    read, router, pairs, to = (
        Buffer("x", width),
        Buffer("router", experts),
        Buffer("routes", 2 * picks),
        Buffer("to", width),
    )
    activated, each = Buffer("activated", picks * inner), Buffer("each", picks * width)
    first, second = stacked([list(weight.chunk(2)) for weight in up], 16), stacked([[weight] for weight in down], 32)
    out, routes = torch.ones(rows, width), torch.empty(rows, 2 * picks)
    run(
        found,
        {read: x, router: logits.clone(), pairs: routes, to: out},
        steps.Route(name="route", x=router, to=pairs, normalized=normalized),
        steps.Sort(name="sort", routes=pairs, experts=experts),
        steps.ExpertLinear(
            name="up", x=read, routes=pairs, to=activated, weight=first, activation=Activation.SILU, gated=True
        ),
        steps.ExpertLinear(name="down", x=activated, routes=pairs, to=each, weight=second),
        steps.Combine(name="combine", x=each, routes=pairs, to=Into(to, add=True)),
        threads=threads,
    )
    chosen, weights = reference.route(logits, picks, normalized=normalized)
    assert torch.equal(routes[:, ::2].long(), chosen)
    assert same_bits(routes[:, 1::2].contiguous(), weights)
    assert same_bits(out, 1 + reference.mixture(x, chosen, weights, up, down))


def test_rows_times_the_sigmoid_of_a_factor(found: ctypes.CDLL) -> None:
    x, factors, out = numbers(1, 7, 21), numbers(2, 7, 1), torch.ones(7, 21)
    read, gates, to = Buffer("x", 21), Buffer("factors", 1), Buffer("to", 21)
    step = steps.Gate(name="gate", x=read, factors=gates, to=Into(to, add=True))
    run(found, {read: x, gates: factors, to: out}, step)
    assert same_bits(out, 1 + x * reference.sigmoid(factors))
