"""Routes and layers of experts in Triton have the bits of the program's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import usual
from helpers.triton_steps import alike, numbers, rows_of

from detgen.kernels.c.panels import stacked
from detgen.kernels.c.quantizing import MADE, PAIRED, Form
from detgen.kernels.triton.runner import TritonRunner
from detgen.program import steps
from detgen.program.experts import Combine, ExpertLinear, Route, Sort, Weigh
from detgen.program.operands import PANEL, Activation, Buffer, Into, Scoring, Weight
from detgen.program.program import Program


@pytest.mark.parametrize(
    ("form", "experts", "picks", "rows"),
    [
        *(("none", *of, 6) for of in usual(((5, 2), (150, 2)), ((40, 3), (4, 4)))),
        *((form, 5, 2, 3) for form in usual(("tc25", "q8"), (*PAIRED, *MADE))),
    ],
)
def test_experts(device: str, form: Form, experts: int, picks: int, rows: int) -> None:
    """Routes, what each of a row's experts gives, and their sum."""
    hidden, inner = 32, 40 if form == "none" else 64
    up, down = numbers(1, experts, 2 * inner, hidden) * 0.2, numbers(2, experts, hidden, inner) * 0.2
    weighed = Buffer("weighed", picks * hidden)  # which is read, or x is
    x, logits, routes = Buffer("x", hidden), Buffer("logits", experts), Buffer("routes", 2 * picks)
    made, each, to = Buffer("made", picks * inner), Buffer("each", picks * hidden), Buffer("to", hidden)
    several = numbers(4, rows, experts)
    several[1, 3] = several[1, 1]  # a tie, of which the first is taken
    for normalized in (True, False):
        kept = Buffer("kept", experts)  # where the interpreter leaves probabilities
        buffers = {
            x: numbers(3, rows, hidden),
            logits: several,
            routes: torch.zeros(rows, 2 * picks),
            made: torch.zeros(rows, made.width),
            each: torch.zeros(rows, each.width),
            to: numbers(5, rows, hidden),
        }
        found = alike(
            device,
            rows_of(rows),
            buffers,
            steps.Copy(name="kept", x=logits, to=Into(kept)),
            Route(name="routes", x=kept, to=routes, normalized=normalized),
            Sort(name="sorted", routes=routes, experts=experts),
            Weigh(name="weighed", x=x, routes=routes, to=weighed),
            ExpertLinear(
                name="up", x=x if normalized else weighed, routes=routes, to=made,
                weight=_stacked(up, form, gated=True, biased=normalized),
                activation=Activation.SILU, gated=True, limit=0.4 * normalized, slope=1.702, shift=1.0,
            ),
            ExpertLinear(name="down", x=made, routes=routes, to=each, weight=_stacked(down, form, biased=normalized)),
            Combine(name="sum", x=each, routes=routes, to=Into(to, add=True, factor=0.5), weighed=normalized),
        )  # fmt: skip
        assert found[routes][:, ::2].diff(dim=1).gt(0).all()


@pytest.mark.parametrize("picks", [1, 2, 5])
def test_routes_by_sparse_mixing(device: str, picks: int) -> None:
    """Logits that tie, that are close to each other and far, below zero and above."""
    experts, rows = 20, 9
    x, kept, routes = Buffer("logits", experts), Buffer("kept", experts), Buffer("routes", 2 * picks)
    logits = numbers(3, rows, experts)
    logits[2:4], logits[4], logits[5] = logits[2:4].round(), -100.0, logits[5].abs() - 9
    how: dict[str, Any] = {"scoring": Scoring.SPARSE, "normalized": False, "spread": 0.6}
    buffers = {x: logits, routes: torch.zeros(rows, 2 * picks)}
    route = Route(name="routes", x=kept, to=routes, **how)
    found = alike(device, rows_of(rows), buffers, steps.Copy(name="kept", x=x, to=Into(kept)), route)[routes]
    assert ((found[:, 1::2] > 0) & (found[:, 1::2] <= 1)).all()


SCORINGS = [scoring for scoring in Scoring if scoring != Scoring.SPARSE]
GROUPS = [(1, 1, 1), (4, 2, 1), (4, 3, 2), (20, 7, 2), (8, 1, 2)]  # how many, how many of them, by how many experts


@pytest.mark.parametrize(
    ("scoring", "grouped"),
    # With more than one group, and with one, each way to score is tried.
    usual(
        [*zip(SCORINGS, itertools.cycle(GROUPS[1:])), *((scoring, GROUPS[0]) for scoring in SCORINGS)],
        itertools.product(SCORINGS, GROUPS),
    ),
)
def test_routes_by_scores_and_groups(device: str, scoring: Scoring, grouped: tuple[int, int, int]) -> None:
    groups, best, of = grouped
    experts, picks, rows = 40, 5, 7
    x, kept, routes = Buffer("logits", experts), Buffer("kept", experts), Buffer("routes", 2 * picks)
    logits = numbers(groups, rows, experts)
    logits[2:4], logits[4] = logits[2:4].round(), -100.0  # ties; hardly any score
    how: dict[str, Any] = {"scoring": scoring, "groups": groups, "best_groups": best, "of_group": of, "factor": 2.5}
    for correction, factors in ((None, numbers(8, experts)), (numbers(9, experts).round(), None)):
        for normalized in {True, scoring == Scoring.OVER_PICKS}:  # the latter always are
            buffers = {x: logits.clone(), routes: torch.zeros(rows, 2 * picks)}
            own = {"correction": correction, "factors": factors}
            route = Route(name="routes", x=kept, to=routes, normalized=normalized, **own, **how)
            found = alike(device, rows_of(rows), buffers, steps.Copy(name="kept", x=x, to=Into(kept)), route)[routes]
            assert len((found[0, ::2] // (experts // groups)).unique()) <= best


def test_routes_of_what_is_no_number(device: str) -> None:
    """They are experts that there are, so that weights are read that there are."""
    x, routes = Buffer("x", 6), Buffer("routes", 4)
    program = Program(x, routes)
    program.add(Route(name="routes", x=x, to=routes, normalized=True))
    given = {x: torch.full((1, 6), torch.nan, device=device), routes: torch.full((1, 4), -7.0, device=device)}
    TritonRunner(program).run(rows_of(1).to(device), given)
    assert given[routes][0, ::2].tolist() == [0, 1]
    assert given[routes][0, 1::2].isnan().all()


def _stacked(weights: torch.Tensor, form: Form, *, gated: bool = False, biased: bool = False) -> Weight:
    dtype = torch.bfloat16 if form in PAIRED else torch.float32
    parts = [list(w.to(dtype).chunk(2)) if gated else [w.to(dtype)] for w in weights]
    biases = [[part[:, 0].float() for part in of] for of in parts] if biased else []
    return stacked(parts, PANEL // 2 if gated else PANEL, form, biases)
