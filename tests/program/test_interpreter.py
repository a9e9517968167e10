"""The interpreter knows each kind of step, and no other."""

from __future__ import annotations

import pytest
import torch

from detgen.program import steps
from detgen.program.interpreter import Interpreter, compute
from detgen.program.operands import Buffer, Into, Step
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.steps import STEPS

ALONG, NONE = torch.arange(3), torch.zeros(0, 4, dtype=torch.int64)
ROWS = Rows(ALONG, ALONG, ALONG, ALONG[[2, 0]], NONE, NONE)
X, Y = Buffer("x", 2), Buffer("y", 2)


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_each_kind_has_a_function(kind: type[Step]) -> None:
    """Of its own: what the base class has is an error."""
    assert compute.dispatch(kind) not in {compute.dispatch(other) for other in (Step, *STEPS) if other is not kind}


def test_another_kind_is_an_error() -> None:
    class Unknown(Step):
        pass

    program = Program()
    program.steps.append(Unknown(name="new"))
    with pytest.raises(TypeError, match="step 'new': the interpreter knows no Unknown"):
        Interpreter(program).run(ROWS, {})


def test_who_asks_is_told_what_each_step_wrote() -> None:
    """The wanted rows, in their order, or all; what is given is written in place."""
    program = Program(X)
    program.add(steps.Copy(name="twice", x=X, to=Into(Y, factor=2.0)))
    program.add(steps.Take(name="wanted", x=Y, to=Y))
    x, told = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), {}
    broken = Interpreter(program).run(ROWS, {X: x, Y: (y := torch.zeros(3, 2))}, lambda *args: told.update([args]))
    assert told["twice"].shape == (3, 2)
    assert told["wanted"].tolist() == y[:2].tolist() == [[10, 12], [2, 4]]
    assert not broken.any()
