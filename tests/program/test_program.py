"""A step that does not fit is refused where the program is built, by its name; a program can be read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.examples import thorough

from detgen.kernels.c.panels import joined, panels, stacked
from detgen.kernels.drawn_weights import in_few_bits
from detgen.program import operands, steps
from detgen.program.experts import Combine, ExpertLinear, Route, Sort
from detgen.program.operands import GROUP, PAGE, Activation, Buffer, Cache, Into, Step
from detgen.program.program import Program, StepError
from detgen.program.storage import Storage

X, Y, OUT = Buffer("x", 20), Buffer("y", 40), Buffer("out", 40)
WIDE, OTHER = Buffer("wide", 80), Buffer("other", 80)
LOGITS, ROUTES, EACH = Buffer("logits", 4), Buffer("routes", 4), Buffer("each", 80)
QKV, ATTENDED = Buffer("qkv", 32), Buffer("attended", 16)
WEIGHT = joined([torch.randn(40, 20)], [torch.randn(40)])
EXPERTS = stacked([[torch.randn(40, 20)] for _ in range(4)], 32)
OF_HEADS = stacked([[torch.randn(40, 20)] for _ in range(2)], 32)
SORT = Sort(name="sort", routes=ROUTES, experts=4)
TABLE = torch.randn(7, 20)
CODES = joined([in_few_bits(1, 40, 32, Storage.CODE, Storage.FLOAT, GROUP, False)], [])


def linear(**fields: Any) -> Step:
    return steps.Linear(**{"name": "up", "x": X, "to": Into(Y), "weight": WEIGHT, **fields})


def norm(**fields: Any) -> Step:
    return steps.Norm(
        **{"name": "norm", "x": X, "to": Into(X), "size": 20, "epsilon": 1e-5, "centred": False, **fields}
    )


def expert(**fields: Any) -> Step:
    return ExpertLinear(**{"name": "up", "x": X, "routes": ROUTES, "to": EACH, "weight": EXPERTS, **fields})


def by_head(**fields: Any) -> Step:
    how = {"name": "heads", "x": Y, "to": Buffer("parts", 160), "heads": 2, "weight": OF_HEADS, **fields}
    return steps.HeadLinear(**how)


def cache(**fields: Any) -> Cache:
    keys, kept = torch.zeros(3, 1, 8, PAGE), torch.zeros(3, 1, PAGE, 8)
    return Cache(**{"heads": 2, "kv_heads": 1, "size": 8, "values": 8, "keys": keys, "kept": kept, **fields})


def rotate(**fields: Any) -> Step:
    return steps.Rotate(**{"name": "turn", "qkv": QKV, "cache": cache(), **fields})


def attend(**fields: Any) -> Step:
    return steps.Attend(**{"name": "see", "qkv": QKV, "cache": cache(), "to": ATTENDED, "scale": 1.0, **fields})


def build(*made: Step, given: tuple[Buffer, ...] = (X, LOGITS, ROUTES, QKV)) -> Program:
    program = Program(*given)
    for step in made:
        program.add(step)
    return program


def test_what_fits_is_taken() -> None:
    route = Route(name="route", x=LOGITS, to=ROUTES, normalized=True)
    combine = Combine(name="sum", x=EACH, routes=ROUTES, to=Into(Y, add=True))
    made = (linear(), norm(weight=torch.ones(20)), rotate(), attend(), route, SORT, expert(), combine)
    assert build(*made).steps == list(made)


def test_steps_fill_rows_together() -> None:
    """Then these can be read, and added to in any order."""
    halves = [linear(to=Into(WIDE)), linear(to=Into(WIDE), at=40)]
    more = [linear(to=Into(WIDE, add=True), at=40), linear(to=Into(WIDE, add=True), at=13)]
    read = steps.Copy(name="copy", x=WIDE, to=Into(OTHER))
    assert str(build(*halves, *more, read)).count("at=40") == 2


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "width read": (lambda: build(linear(x=Y), given=(Y,)), r"'up' \(Linear\): y\[40\] has not the width 20"),
    "width written": (lambda: build(linear(to=Into(X))), r"40 results from 0 on go beyond x\[20\]"),
    "written before": (lambda: build(linear(to=Into(WIDE), at=-1)), "40 results from -1 on go beyond"),
    "written too far": (lambda: build(linear(to=Into(WIDE), at=41)), r"40 results from 41 on go beyond wide\[80\]"),
    "gated too far": (
        lambda: build(steps.Gate(name="g", x=X, at=1, gates=X, to=Into(X))),
        r"20 entries from 1 on go beyond x\[20\]",
    ),
    "copied too far": (
        lambda: build(steps.Copy(name="copy", x=X, at=21, to=Into(Y))),
        "20 entries from 21 on go beyond 40",
    ),
    "copied without a beginning": (
        lambda: build(steps.Copy(name="copy", x=X, at=20, to=Into(Y))),
        r"writes y\[40\] from 20 on, which",
    ),
    "mixed": (
        lambda: build(steps.Mix(name="mix", x=X, coefficients=LOGITS, to=Into(X), size=5)),
        r"logits\[4\] has not the width 16",
    ),
    "mixed in part": (
        lambda: build(steps.Mix(name="mix", x=X, coefficients=LOGITS, to=Into(Y), size=19)),
        r"x\[20\] has not the width 19",
    ),
    "too many vectors": (
        lambda: build(steps.Mix(name="mix", x=X, coefficients=X, to=Into(Buffer("one", 1)), size=1)),
        "more than 16 vectors are mixed",
    ),
    "tokens of a table": (
        lambda: build(steps.Embed(name="ids", table=TABLE, storage=Storage.FLOAT, to=Into(X), known=8)),
        "a table of 7 entries, not 8",
    ),
    "function of gates": (
        lambda: build(steps.Gate(name="g", x=X, gates=X, to=Into(X), function=Activation.TANH)),
        "a gate by TANH",
    ),
    "a gap": (
        lambda: build(linear(to=Into(WIDE)), linear(to=Into(WIDE), at=39)),
        r"writes wide\[80\] from 39 on, which",
    ),
    "nothing before": (lambda: build(linear(to=Into(WIDE), at=40)), r"writes wide\[80\] from 40 on, which"),
    "read in part": (
        lambda: build(linear(to=Into(WIDE)), steps.Copy(name="copy", x=WIDE, to=Into(OTHER))),
        r"reads wide\[80\], of which only 40 entries of a row are written",
    ),
    "never written": (lambda: build(linear(), given=()), r"reads x\[20\], which no step has written"),
    "never written, added to": (lambda: build(linear(to=Into(Y, add=True))), r"reads y\[40\], which no step"),
    "other rows": (lambda: build(linear(wanted=True)), r"reads the wanted rows, but x\[20\] has all"),
    "rows taken twice": (
        lambda: build(*(2 * [steps.Take(name="take", x=X, to=X)])),
        r"reads all rows, but x\[20\] has others",
    ),
    "no place": (lambda: build(linear(to=Y)), "to is Buffer.*, no Into"),
    "no number": (lambda: build(linear(softcap="3")), "softcap is '3', no float"),
    "a number for a flag": (lambda: build(linear(gated=1)), "gated is 1, no bool"),
    "a flag for a number": (lambda: build(norm(vectors=True)), "vectors is True, no int"),
    "a number for a kind": (lambda: build(linear(activation=1)), "activation is 1, no Activation"),
    "nothing": (lambda: build(linear(weight=None)), "weight is None, no Weight"),
    "inside": (lambda: build(linear(to=Into(Y, factor="1"))), "to.factor is '1', no float"),  # type: ignore[arg-type]
    "turned": (lambda: build(norm(weight=torch.ones(40)[::2])), r"weight is of the shape \[20\], not contiguous"),
    "format": (lambda: build(norm(weight=torch.ones(20).half())), "weight in float16"),
    "shape": (lambda: build(norm(weight=torch.ones(19))), r"weight has the shape \[19\], not \[20\]"),
    "vectors": (lambda: build(norm(vectors=2)), "2 vectors of 20 from 0 on go beyond"),
    "part": (lambda: build(norm(to=Into(Y))), "is written in part"),
    "bias alone": (lambda: build(norm(bias=torch.ones(20))), "without a weight"),
    "function of a layer": (lambda: build(linear(activation=Activation.TANH)), "a linear layer has no TANH"),
    "gated": (lambda: build(linear(gated=True)), "take 96 columns, not 64"),
    "softcap": (
        lambda: build(linear(), linear(to=Into(Y, add=True), softcap=3.0)),
        "results with a softcap cannot be added",
    ),
    "table": (
        lambda: build(steps.Embed(name="ids", table=TABLE, storage=Storage.HALF, to=Into(X))),
        "weights in HALF are float16, not float32",
    ),
    "table of codes": (
        lambda: build(steps.EmbedColumn(name="ids", weight=CODES, to=Into(Buffer("wide", 32)))),
        "a column of weights in CODE",
    ),
    "codes": (lambda: build(linear(weight=replace(WEIGHT, codes=torch.ones(16)))), "weights in FLOAT have no codes"),
    "parts read": (lambda: build(by_head(passed=1), given=(Y,)), r"y\[40\] has not the width 42"),
    "parts written": (lambda: build(by_head(to=X), given=(Y,)), r"80 results go beyond x\[20\]"),
    "weights of heads": (lambda: build(by_head(heads=4), given=(Y,)), r"not \[4, 2, 20, 32\]"),
    "biases of heads": (
        lambda: build(by_head(weight=replace(OF_HEADS, bias=torch.ones(2, 64))), given=(Y,)),
        "a bias of heads",
    ),
    "heads": (lambda: build(attend(cache=cache(heads=3, kv_heads=2))), "3 query heads cannot share 2"),
    "pages": (lambda: build(rotate(cache=cache(keys=torch.zeros(3, 1, 8, 32)))), r"not \[any, 1, 8, 64\]"),
    "no angles": (lambda: build(rotate(turned=4)), "no cosines or sines to rotate by"),
    "picks": (
        lambda: build(Route(name="r", x=LOGITS, to=Buffer("many", 10), normalized=True)),
        "5 of 4 experts, where 1 to 64 can be taken",
    ),
    "not sorted": (lambda: build(expert()), r"the rows of routes\[4\] are not sorted"),
    "routed again": (
        lambda: build(SORT, Route(name="r", x=LOGITS, to=ROUTES, normalized=True), expert()),
        "are not sorted",
    ),
    "experts": (lambda: build(Sort(name="sort", routes=ROUTES, experts=5), expert()), "4 experts, not 5"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(StepError, match=message):
        make()


def test_fields_are_those_of_the_kind() -> None:
    """One that is missing, one that is unknown, and one of another kind of step."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'weight'"):
        steps.Linear(name="up", x=X, to=Into(Y))  # type: ignore[call-arg]
    for field in ({"gate": True}, {"epsilon": 1e-5}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            linear(**field)


CHECKED = """
from detgen.program.operands import Buffer, Into
from detgen.program.steps import Softmax, Sum
x = Buffer("x", 3)
Sum(name="sum", x=x, to=x)
Sum(name="sum", x=x)
Sum(name="sum", x=x, to=x, factor=2.0)
Sum(name="sum", x=x, to=Into(x))
Softmax(name="softmax", x=3, to=x)
"""


@thorough
def test_mypy_finds_wrong_fields(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(CHECKED)
    command = ["-m", "mypy", "--strict", "--follow-imports=skip", f"--cache-dir={tmp_path}"]
    declared = operands.__file__, steps.__file__
    done = subprocess.run([sys.executable, *command, *declared, program], capture_output=True, text=True, check=False)
    found = [line.split(":")[1] for line in done.stdout.splitlines() if line.startswith(str(program))]
    assert found == ["6", "7", "8", "9"]


def test_a_program_can_be_read() -> None:
    """A line a step: its name, its kind, what it reads and writes, and what else it has."""
    some = panels([torch.zeros(40, 20, dtype=torch.bfloat16)])
    listing = str(
        build(
            norm(weight=torch.ones(20)),
            linear(name="up", weight=some, activation=Activation.SILU),
            linear(name="again", to=Into(Y, add=True, factor=0.5)),
            steps.Take(name="rows wanted", x=Y, to=OUT),
        )
    )
    assert listing.splitlines() == [
        "norm         Norm    x[20] -> x[20]           size=20, weight=[20], epsilon=1e-05, centred=False",
        "up           Linear  x[20] -> y[40]           20x40 BFLOAT, activation=SILU",
        "again        Linear  x[20] +> y[40]           factor=0.5, 20x40 FLOAT +bias",
        "rows wanted  Take    y[40] -> out[40] wanted",
    ]
