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
from detgen.kernels.judging import Scores
from detgen.kernels.native import reference
from detgen.kernels.native.library import BUILDS, Rows, Runner, build
from detgen.kernels.native.panels import panels
from detgen.kernels.native.program import BLOCK, SCORED, Activation, Builder, Kind, Norm
from detgen.kernels.native.quantizing import narrowed
from detgen.kernels.probe import same_bits

PAGE = 64
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


def with_buffers(**widths: int) -> Builder:
    builder = Builder()
    for name, width in widths.items():
        builder.buffer(name, width)
    return builder


def run(library: ctypes.CDLL, builder: Builder, threads: int = 1, **buffers: torch.Tensor) -> None:
    """A pass without attention whose buffers are given; all rows are wanted, in reverse."""
    along = torch.arange(len(next(iter(buffers.values()))))
    none = torch.zeros(0, 4, dtype=torch.int64)
    given = {builder.buffers[name]: tensor for name, tensor in buffers.items()}
    with using(threads):
        Runner(library, builder).run(Rows(along, along, along, along.flip(0), none, none), given)


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
    packed = panels([weight], bits=bits)
    padded = torch.zeros(packed.columns)
    padded[:outputs] = bias = numbers(3, outputs)
    builder = with_buffers(source=inputs, to=outputs)
    builder.step(
        "step",
        Kind.LINEAR,
        **packed.fields(),
        source="source",
        to="to",
        bias=padded if biased else None,
        variant=activation,
        add=add,
        factor=factor,
    )
    before = numbers(4, rows, outputs)
    out = before.clone()
    run(found, builder, source=x, to=out, threads=threads)
    want = ACTIVATIONS[activation](reference.linear(x, narrowed(weight, bits), bias if biased else None))
    want = want * torch.tensor(factor) if factor != 1 else want
    assert same_bits(out, before + want if add else want)


@examples(10)
@given(rows=st.integers(1, 20), inner=st.integers(1, 50), biased=st.booleans(), storage=storages)
def test_gated_linear(found: ctypes.CDLL, rows: int, inner: int, biased: bool, storage: torch.dtype) -> None:
    x, gate, up = numbers(1, rows, 24), numbers(2, inner, 24).to(storage), numbers(3, inner, 24).to(storage)
    gate_bias, up_bias = numbers(4, inner), numbers(5, inner)
    packed = panels([gate, up], 16)
    bias = torch.zeros(packed.columns)
    for i, part in enumerate((gate_bias, up_bias)):
        bias.view(-1, 2, 16)[:, i] = torch.nn.functional.pad(part, (0, -inner % 16)).view(-1, 16)
    builder = with_buffers(source=24, to=inner)
    builder.step(
        "step",
        Kind.LINEAR,
        **packed.fields(),
        source="source",
        to="to",
        gated=1,
        variant=Activation.SILU,
        bias=bias if biased else None,
    )
    out = torch.empty(rows, inner)
    run(found, builder, source=x, to=out)
    gates = reference.linear(x, gate, gate_bias if biased else None)
    assert same_bits(out, reference.silu(gates) * reference.linear(x, up, up_bias if biased else None))


def test_linear_of_any_rows(found: ctypes.CDLL) -> None:
    """Every row count gives a row the same bits."""
    x, packed = numbers(1, 512, 40), panels([numbers(2, 64, 40)])
    builder = with_buffers(source=40, to=64)
    builder.step("step", Kind.LINEAR, **packed.fields(), source="source", to="to")
    want = torch.empty(512, 64)
    run(found, builder, source=x, to=want, threads=2)
    for rows in range(1, 512):
        out = torch.empty(rows, 64)
        run(found, builder, source=x[512 - rows :].clone(), to=out)
        assert same_bits(out, want[512 - rows :])


def test_linear_softcap(found: ctypes.CDLL) -> None:
    x, weight = numbers(1, 5, 20), numbers(2, 37, 20)
    builder = with_buffers(source=20, to=37)
    builder.step("step", Kind.LINEAR, **panels([weight]).fields(), source="source", to="to", softcap=30.0, factor=0.5)
    out = torch.empty(5, 37)
    run(found, builder, source=x, to=out)
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
    blocks = -(-width // BLOCK)
    builder = with_buffers(source=20, blocks=SCORED * blocks, to=SCORED)
    more = {**panels([weight]).fields(), "softcap": softcap, "factor": 0.5}
    builder.step("logits", Kind.LINEAR, **more, source="source", to="blocks", scored=width)
    builder.step("scores", Kind.SCORE, source="blocks", to="to", inputs=blocks)
    out = torch.empty(rows, SCORED)
    run(found, builder, source=x, to=out, threads=threads)
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
    builder = with_buffers(source=vectors * size, to=vectors * size)
    builder.step(
        "step",
        Kind.NORM,
        source="source",
        to="to",
        columns=size,
        inputs=vectors,
        weight=weight if weighted or biased else None,
        bias=bias if biased else None,
        weight_step=size,
        variant=Norm.LAYER if centred else Norm.RMS,
        epsilon=1e-5,
        add=add,
    )
    out = torch.ones(rows, vectors * size)
    run(found, builder, source=x, to=out, threads=2)
    args = (weight if weighted or biased else None, bias if biased else None)
    want = reference.norm(x.view(rows, vectors, size), *args, 1e-5, centred=centred).view(rows, -1)
    assert same_bits(out, 1 + want if add else want)


@examples(10)
@given(rows=st.integers(1, 40), width=st.integers(1, 40), storage=storages, factor=st.sampled_from([1.0, 5.5]))
def test_embedding(found: ctypes.CDLL, rows: int, width: int, storage: torch.dtype, factor: float) -> None:
    """By token, zeros for a token below 0; then a table of positions is added."""
    table, places = numbers(1, 50, width).to(storage), numbers(2, 50, width)
    builder = with_buffers(to=width)
    builder.step(
        "step", Kind.EMBED, to="to", weight=table, storage=panels([table]).storage, columns=width, factor=factor
    )
    builder.step("step", Kind.EMBED, to="to", weight=places, columns=width, variant=1, offset=2, add=1)
    out = torch.empty(rows, width)
    ids, along = torch.arange(rows) - 1, torch.arange(rows)
    none = torch.zeros(0, 4, dtype=torch.int64)
    Runner(found, builder).run(Rows(ids, along, along, along, none, none), {0: out})
    read = table[ids.clamp(min=0)].float().masked_fill((ids < 0)[:, None], 0)
    assert same_bits(out, (read * torch.tensor(factor) if factor != 1 else read) + places[along + 2])


@examples(20)
@given(rows=st.integers(1, 30), width=st.integers(1, 70), kind=st.sampled_from(Activation), threads=st.integers(1, 3))
def test_functions_of_entries(found: ctypes.CDLL, rows: int, width: int, kind: Activation, threads: int) -> None:
    x, out = numbers(1, rows, width), torch.empty(rows, width)
    x = x.abs() if kind >= Activation.ROOT else x
    builder = with_buffers(source=width, to=width)
    builder.step("step", Kind.ACTIVATE, source="source", to="to", columns=width, variant=kind)
    run(found, builder, source=x, to=out, threads=threads)
    assert same_bits(out, FUNCTIONS[kind](x))


@examples(20)
@given(rows=st.integers(1, 30), width=st.integers(1, 70), threads=st.integers(1, 3))
def test_softmax_and_sum(found: ctypes.CDLL, rows: int, width: int, threads: int) -> None:
    x, chances, totals = numbers(1, rows, width), torch.empty(rows, width), torch.empty(rows, 1)
    builder = with_buffers(source=width, chances=width, totals=1)
    builder.step("softmax", Kind.SOFTMAX, source="source", to="chances", columns=width)
    builder.step("sum", Kind.SUM, source="source", to="totals", columns=width)
    run(found, builder, source=x, chances=chances, totals=totals, threads=threads)
    assert same_bits(chances, reference.softmax(x))
    assert same_bits(totals[:, 0].contiguous(), reference.total(x))


def test_copies(found: ctypes.CDLL) -> None:
    """Of the wanted rows, or of all to a place within a row, added."""
    x = numbers(1, 9, 21)
    builder = with_buffers(source=21, to=30, picked=21)
    builder.step("step", Kind.COPY, source="source", to="to", to_at=4, columns=21, add=1, factor=2.0)
    builder.step("step", Kind.COPY, source="source", to="picked", columns=21, wanted=1, variant=1)
    out, chosen = torch.ones(9, 30), torch.empty(9, 21)
    run(found, builder, source=x, to=out, picked=chosen, threads=2)
    want = torch.ones(9, 30)
    want[:, 4:25] += 2 * x
    assert same_bits(out, want)
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
    builder = with_buffers(source=width, to=heads * values)
    shared = {
        "source": "source",
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "values": values,
        "turned": turned,
        "interleaved": interleaved,
        "cosines": cosines,
        "sines": sines,
        "keys": keys,
        "kept": kept,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "scale": 0.2,
    }
    builder.step("step", Kind.ROTATE, **shared, to="source", last=1)
    builder.step("step", Kind.ATTEND, **shared, to="to")
    x, out = numbers(5, rows, width), torch.empty(rows, heads * values)
    given_rows = x.clone()
    pieces = lay_out(np.arange(slots), np.array([start for start, _ in spans]), lengths, group)
    laid_out = Rows(positions, positions, places, positions[:0], tables, pieces)
    with using(threads):
        broken = Runner(found, builder).run(laid_out, {0: given_rows, 1: out})
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
    builder = with_buffers(source=48, to=16)
    keys, kept = torch.zeros(1, 1, 16, PAGE), torch.zeros(PAGE, 1, 16)
    shared = {"source": "source", "heads": 1, "kv_heads": 1, "size": 16, "values": 16, "keys": keys, "kept": kept}
    shared["scale"] = 0.25
    builder.step("step", Kind.ROTATE, **shared, to="source", last=1)
    builder.step("step", Kind.ATTEND, **shared, to="to")
    x = numbers(1, 5, 48)
    sound = x.clone()
    x[2, 17], x[2, 18], x[2, 40], x[4, 47] = torch.nan, torch.inf, -torch.inf, torch.nan
    out, want = torch.empty(5, 16), torch.empty(5, 16)
    along, table = torch.arange(5), torch.zeros(1, 1, dtype=torch.int64)
    pieces = torch.tensor([[0, 0, 5, 0]])
    broken = Runner(found, builder).run(Rows(along, along, along, along, table, pieces), {0: x, 1: out})
    assert broken.tolist() == [False, False, True, False, False]
    assert keys.isfinite().all()
    assert kept.isfinite().all()
    Runner(found, builder).run(Rows(along, along, along, along, table, pieces), {0: sound, 1: want})
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
    builder = with_buffers(
        x=width, router=experts, routes=2 * picks, activated=picks * inner, each=picks * width, to=width
    )
    count = {"experts": experts, "picks": picks}
    builder.step("route", Kind.ROUTE, **count, variant=normalized, source="router", to="routes")
    builder.step("sort", Kind.SORT, **count, source="routes", to="routes")
    packed = [panels(list(weight.chunk(2)), 16) for weight in up], [panels([weight]) for weight in down]
    fields = [{**p[0].fields(), "weight": torch.stack([q.weight for q in p])} for p in packed]
    builder.step(
        "up",
        Kind.LINEAR,
        **{**fields[0], **count},
        gated=1,
        variant=Activation.SILU,
        to_step=inner,
        source="x",
        to="activated",
    )
    builder.step(
        "down", Kind.LINEAR, **{**fields[1], **count}, source_step=inner, to_step=width, source="activated", to="each"
    )
    builder.step(
        "combine", Kind.COMBINE, **count, routes=builder.buffers["routes"], columns=width, add=1, source="each", to="to"
    )
    out, routes = torch.ones(rows, width), torch.empty(rows, 2 * picks)
    run(found, builder, x=x, router=logits.clone(), routes=routes, to=out, threads=threads)
    chosen, weights = reference.route(logits, picks, normalized=normalized)
    assert torch.equal(routes[:, ::2].long(), chosen)
    assert same_bits(routes[:, 1::2].contiguous(), weights)
    assert same_bits(out, 1 + reference.mixture(x, chosen, weights, up, down))


def test_rows_times_the_sigmoid_of_a_factor(found: ctypes.CDLL) -> None:
    x, factors, out = numbers(1, 7, 21), numbers(2, 7, 1), torch.ones(7, 21)
    builder = with_buffers(source=21, factors=1, to=21)
    builder.step("gate", Kind.COPY, columns=21, variant=2, routes=1, add=1, source="source", to="to")
    run(found, builder, source=x, factors=factors, to=out)
    assert same_bits(out, 1 + x * reference.sigmoid(factors))
