"""Layers that keep states: what transformers computes, and the same bits in any passes, with rejections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import examples
from helpers.steps import numbers
from helpers.threads import using
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from detgen.kernels.c.library import BUILDS, Runner, build
from detgen.program.arrays import same_bits, tensor
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Activation, Buffer, Into
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace
from detgen.program.steps import Norm

LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
KEYS, HEADS, SIZE, VALUES, TAPS, RING, LENGTH = 2, 4, 20, 70, 4, 12, 24
WIDTH = 2 * KEYS * SIZE + HEADS * VALUES
X, MIXED, TO = Buffer("x", WIDTH), Buffer("mixed", WIDTH), Buffer("to", HEADS * VALUES)
DECAY, STRENGTH = Buffer("decay", HEADS), Buffer("strength", HEADS)
WEIGHT, RATES, BIAS = numbers(1, TAPS, WIDTH) / 2, -np.abs(numbers(2, HEADS)), numbers(3, HEADS)
SKIP, LIMITS = numbers(10, HEADS), (0.4, 1.3)  # of a state space, whose steps are between them
KQ, TIMES, VALUE = Buffer("kq", 2 * SIZE), Buffer("times", TO.width), Buffer("value", TO.width)  # of a scan
GIVEN = {
    **{X: numbers(4, LENGTH, WIDTH), DECAY: numbers(5, LENGTH, HEADS), STRENGTH: numbers(6, LENGTH, HEADS)},
    **{b: numbers(11 + i, LENGTH, b.width) for i, b in enumerate((KQ, TIMES, VALUE))},
}
FIXED = {"rates": -np.abs(numbers(14, SIZE, TO.width)), "bias": numbers(15, TO.width), "skip": numbers(16, TO.width)}

KINDS = [DeltaRule, StateSpace, SelectiveScan]
Kind = type[DeltaRule] | type[StateSpace] | type[SelectiveScan]


def _program(kind: Kind) -> Program:
    """A convolution and a delta rule with queries and keys of length 1, of two slots in which others left something.

    Or a convolution with a bias and a state space, or a selective scan alone.
    """
    made, keys = Program(*GIVEN), KEYS * SIZE
    if kind is SelectiveScan:
        left = {"state": numbers(8, 2, 1, SIZE, TO.width), "kept": numbers(9, 2, RING, SIZE + 2 * TO.width)}
        scanned: dict[str, Any] = {"size": SIZE, "values": TO.width, "ring": RING, **FIXED, **left}
        made.add(SelectiveScan(name="scanned", x=VALUE, times=TIMES, kq=KQ, to=TO, **scanned))
        return made
    silu: dict[str, Any] = {"activation": Activation.SILU, "taps": TAPS, "ring": RING}
    bias = None if kind is DeltaRule else WEIGHT[0]
    made.add(
        Convolve(name="convolved", x=X, to=MIXED, weight=WEIGHT, bias=bias, kept=numbers(7, 2, RING, WIDTH), **silu)
    )
    kept: dict[str, Any] = {
        "state": numbers(8, 2, HEADS, SIZE, VALUES),
        "kept": numbers(9, 2, RING, keys + HEADS * VALUES + 2 * HEADS),
    }
    sizes: dict[str, Any] = {"heads": HEADS, "key_heads": KEYS, "size": SIZE, "values": VALUES, "ring": RING}
    gates: dict[str, Any] = {"decay": DECAY, "rates": RATES, "bias": BIAS}
    if kind is StateSpace:
        limits = dict(zip(("least", "most"), LIMITS, strict=True))
        made.add(StateSpace(name="spaced", qkv=MIXED, to=TO, skip=SKIP, **limits, **gates, **sizes, **kept))
        return made
    for at, scale in ((0, 1 / SIZE), (keys, SIZE**-0.5)):
        shape: dict[str, Any] = {"at": at, "vectors": KEYS, "size": SIZE, "weight": np.full(SIZE, scale, np.float32)}
        made.add(Norm(name="normed", x=MIXED, to=Into(MIXED), epsilon=1e-6 / SIZE, centred=False, **shape))
    made.add(DeltaRule(name="ruled", qkv=MIXED, to=TO, strength=STRENGTH, **gates, **sizes, **kept))
    return made


def _pass(run: Interpreter | Runner, given: dict[Buffer, np.ndarray], spans: list[list[int]]) -> np.ndarray:
    count = len(given[X])
    along, out = np.arange(count), np.empty((count, TO.width), np.float32)
    none = np.zeros((0, 4), np.int64)
    run.run(Rows(along, along, along, along[:0], none, none, np.array(spans)), given | {TO: out})
    return out


def _whole(run: Interpreter | Runner) -> np.ndarray:
    return _pass(run, GIVEN, [[0, 0, 0, LENGTH, 0, LENGTH]])


@pytest.mark.parametrize("kind", [DeltaRule, StateSpace])
def test_it_is_what_transformers_computes(kind: Kind) -> None:
    """Its own code in float64 is as far away as float32 is."""
    x, decay, strength = (tensor(GIVEN[b]).double() for b in (X, DECAY, STRENGTH))
    weight = tensor(WEIGHT).double()
    bias = None if kind is DeltaRule else weight[0]
    mixed = qwen.causal_conv1d_fn(x.t()[None], weight.t(), bias, activation="silu")[0].t()
    q, k, v = mixed.split([KEYS * SIZE, KEYS * SIZE, HEADS * VALUES], 1)
    q, k = (x.view(1, LENGTH, KEYS, SIZE) for x in (q, k))
    v, found = v.view(1, LENGTH, HEADS, VALUES), tensor(_whole(Interpreter(_program(kind))))
    rates, skip, bias = (tensor(x).double() for x in (RATES, SKIP, BIAS))
    if kind is DeltaRule:
        want, _ = qwen.torch_recurrent_gated_delta_rule(
            *(q, k, v),
            g=(rates * torch.nn.functional.softplus(decay + bias))[None],
            beta=strength.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )
    else:
        how: dict[str, Any] = {"D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": LIMITS}
        want = mamba2.mamba2_chunk_scan(v, decay[None], rates, k, q, 5, **how)
    want = want.reshape(LENGTH, -1).float()
    assert (found - want).abs().max() < 1e-5 * want.abs().max()


def test_a_selective_scan_is_what_transformers_computes() -> None:
    """Its own code in float64 is as far away as float32 is."""
    kq, times, value = (tensor(GIVEN[b]).double().t()[None] for b in (KQ, TIMES, VALUE))
    key, query = kq.split(SIZE, 1)
    rates, bias, skip = (tensor(FIXED[name]).double() for name in ("rates", "bias", "skip"))
    how: dict[str, Any] = {"D": skip, "delta_bias": bias, "delta_softplus": True}
    want = mamba.mamba_selective_scan(value, times, rates.t(), key, query, **how)[0].t().float()
    found = tensor(_whole(Interpreter(_program(SelectiveScan))))
    assert (found - want).abs().max() < 1e-5 * want.abs().max()


@st.composite
def _cut(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    made, base, start = [], 0, 0
    while start < LENGTH:
        right = min(draw(st.integers(1, 9)), LENGTH - start)
        drafted = right <= 4 and start - base <= 4
        wrong = draw(st.integers(0, 3)) if drafted else 0
        certain = start + draw(st.integers(0, 1)) if drafted else start + right  # of a draft, its first row or none
        made.append((base, start, right, wrong, certain))
        base, start = certain, start + right
    return made


@examples(25)
@given(kind=st.sampled_from(KINDS), rounds=_cut(), threads=st.integers(1, 3))
def test_rows_have_the_same_bits_in_any_passes(
    kind: Kind, rounds: list[tuple[int, int, int, int, int]], threads: int
) -> None:
    """Of windows with wrong drafts behind the right ones, beside a neighbour, in every build."""
    want = _whole(Interpreter(_program(kind)))
    runs: list[Interpreter | Runner] = [Runner(library, _program(kind)) for library in LIBRARIES.values()]
    for run in [Interpreter(_program(kind)), *runs]:
        with using(threads):
            assert all(same_bits(*pair) for pair in _results(run, rounds, want))


def _results(
    run: Interpreter | Runner, rounds: list[tuple[int, int, int, int, int]], want: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for base, start, right, wrong, certain in rounds:
        other, count = 2, right + wrong
        given = {
            b: np.concatenate(
                [numbers(start + 30, other, b.width), x[start : start + right], numbers(start + 60, wrong, b.width)]
            )
            for b, x in GIVEN.items()
        }
        spans = [[0, 0, 0, other, 0, other], [1, other, start, count, base, certain]]
        yield _pass(run, given, spans)[other : other + right], want[start : start + right]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_state_that_is_not_rolled_back_is_found(name: str, kind: Kind) -> None:
    """A pass that takes a row for certain which was wrong gives other bits afterwards."""
    want = _whole(Interpreter(_program(kind)))
    sound = [(0, 0, 2, 1, 1), (1, 2, 1, 0, 3)]
    broken = [(0, 0, 2, 1, 3), (3, 2, 1, 0, 3)]  # the wrong row has moved the state on
    assert all(same_bits(*pair) for pair in _results(Runner(LIBRARIES[name], _program(kind)), sound, want))
    first, second = _results(Runner(LIBRARIES[name], _program(kind)), broken, want)
    assert same_bits(*first)
    assert not same_bits(*second)
