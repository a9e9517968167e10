"""Steps that keep states have the bits of the program's interpreter in Triton, and leave the same states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import usual
from helpers.steps import Case as Case_
from helpers.steps import caches_of, differences
from helpers.triton_steps import numbers, on, rows_of

from detgen.kernels.triton import state_kernels
from detgen.kernels.triton.runner import TritonRunner
from detgen.program.arrays import array, each, tensor
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Activation, Buffer, Step
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.states import Convolve, DeltaRule, SelectiveScan, StateSpace

SPANS = [  # slot, first row, its position, rows, the position of the state, up to where rows are certain
    [2, 0, 7, 4, 5, 9],  # two rows are replayed, two stand, two are kept
    [0, 4, 0, 12, 0, 12],  # a new sequence, longer than the ring
    [0, 0, 0, 0, 0, 0],  # padding, which only Triton is given
    [1, 16, 30, 3, 28, 30],  # what is replayed stands, the rows do not
    [3, 19, 9, 2, 8, 8],  # a drafter's own rows move nothing
    [4, 21, 0, 2, 0, 1],
]


@pytest.mark.parametrize("small", usual([True], [False]))
@pytest.mark.parametrize("kind", [Convolve, DeltaRule, StateSpace, SelectiveScan])
def test_states(device: str, kind: type[Step], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes leave of states, too. With small tiles, and one sequence at a time."""
    if small:
        monkeypatch.setattr(state_kernels, "tile", lambda size, most: 8)
        monkeypatch.setattr(state_kernels, "_MOST", 1)
    rows, ring = rows_of(23)._replace(spans=torch.tensor([span for span in SPANS if span[3]])), 8
    padded = rows._replace(spans=torch.tensor(SPANS))
    if kind == Convolve:
        x, to = Buffer("x", 20), Buffer("to", 20)
        given = {x: numbers(1, 23, 20), to: torch.zeros(23, 20)}
        how: dict[str, Any] = {"weight": numbers(2, 3, 20), "bias": numbers(3, 20), "activation": Activation.SILU}
        step: Step = Convolve(name="step", x=x, to=to, taps=3, ring=ring, kept=numbers(4, 5, ring, 20), **how)
    elif kind == SelectiveScan:
        x, times, kq, to = Buffer("x", 40), Buffer("times", 40), Buffer("kq", 6), Buffer("to", 40)
        given = {b: numbers(i, 23, b.width) for i, b in enumerate((x, times, kq, to))}
        given[times][3, 1] = torch.nan
        how = {"x": x, "times": times, "kq": kq, "to": to, "size": 3, "values": 40, "ring": ring}
        how |= {"rates": -numbers(5, 3, 40).abs(), "bias": numbers(6, 40), "skip": numbers(9, 40)}
        step = SelectiveScan(name="step", state=numbers(7, 5, 1, 3, 40), kept=numbers(8, 5, ring, 83), **how)
    else:
        sizes: dict[str, Any] = {"heads": 4, "key_heads": 2, "size": 3, "values": 40, "ring": ring}
        qkv, decay, strength, to = Buffer("qkv", 172), Buffer("decay", 4), Buffer("strength", 4), Buffer("to", 160)
        given = {b: numbers(i, 23, b.width) for i, b in enumerate((qkv, decay, strength, to))}
        given[decay][3, 1] = torch.nan
        how = {"rates": -numbers(5, 4).abs(), "bias": numbers(6, 4), "qkv": qkv, "decay": decay, "to": to}
        how |= {"state": numbers(7, 5, 4, 3, 40), "kept": numbers(8, 5, ring, 6 + 160 + 8)} | sizes
        if kind == DeltaRule:
            step = DeltaRule(name="step", strength=strength, **how)
        else:
            step = StateSpace(name="step", skip=numbers(9, 4), **how, **({} if small else {"least": 0.5, "most": 1.5}))
    program, case = Program(*given), Case_(Program(*given), {b: array(x) for b, x in given.items()}, rows)
    program.add(on(device, step))
    case.program.add(each(step, array))

    def run(_: Rows, given: dict[Buffer, np.ndarray]) -> torch.Tensor:
        theirs = {b: tensor(x).to(device) for b, x in given.items()}
        broken = TritonRunner(program).run(padded.to(device), theirs).bool().cpu()
        for mine, other in zip(caches_of(case.program), caches_of(program), strict=True):
            np.copyto(mine, array(other))
        for buffer, x in given.items():
            np.copyto(x, array(theirs[buffer]))
        return broken

    assert differences(case.after(run), case.after(Interpreter(case.program).run)) == []
