"""The self-test of a device: it runs every kind of step, passes what is right and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from detgen.kernels.sampling import Choices
from detgen.kernels.triton import runner, self_test
from detgen.program import steps, tensor_cores
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Activation
from detgen.program.storage import RULES, Storage

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_every_kernel_is_tried() -> None:
    made = [step for one in self_test.tried(256) for step in one.made]
    assert {type(step) for step in made} == set(runner.KERNELS)
    stored = {step.weight.storage for step in made if isinstance(step, steps.Linear)}
    assert stored == set(Storage)
    assert {step.function for step in made if isinstance(step, steps.Activate)} == set(Activation)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_told_apart(rule: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each other, in all layers; from one in which zeros destroy nothing, where these are beside large numbers."""

    def results(one: self_test.Tried) -> torch.Tensor:
        maker = torch.Generator().manual_seed(1)
        given = {b: torch.randn(one.rows, b.width, generator=maker).abs() for b in one.given}
        Interpreter(self_test._program(one.made, given)).run(self_test.rows_of(one.rows, 200), given)
        return given[one.made[-1].writes]

    some = [one for one in self_test.tried(256, [rule]) if one.name.endswith(rule.name.lower())]
    found = [results(one) for one in some]
    with monkeypatch.context() as patch:
        (other,) = set(RULES) - {rule}
        patch.setitem(RULES, rule, RULES[other])
        assert not any(results(one).equal(x) for one, x in zip(some, found, strict=True))
    own = tensor_cores._exponents
    monkeypatch.setattr(tensor_cores, "_exponents", lambda x: own(x).where(x != 0, -999))
    assert [one.name for one, x in zip(some, found, strict=True) if not results(one).equal(x)] == [some[-1].name]


@pytest.mark.slow
def test_what_is_right_passes(device: str, small_sections: Callable[[], AbstractContextManager[None]]) -> None:
    with small_sections():
        assert self_test.different(device, 256, 500) == []


def test_what_is_wrong_is_named(
    device: str, small_sections: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm and log-probabilities in the last bit, a cache at one place; nothing else is."""
    compute = {kind: runner.KERNELS[kind] for kind in (steps.Norm, steps.Rotate)}

    def norm(step: Any, of: Any) -> None:
        compute[steps.Norm](step, of)
        of[step.writes].view(torch.int32)[0, 0] ^= 1

    def rotate(step: Any, of: Any) -> None:
        compute[steps.Rotate](step, of)
        step.cache.kept.view(torch.int16)[-1, -1, -1, -1] ^= 1

    monkeypatch.setitem(runner.KERNELS, steps.Norm, norm)
    monkeypatch.setitem(runner.KERNELS, steps.Rotate, rotate)
    right = self_test.choose_by

    def logprob(logits: torch.Tensor, choices: Choices, most: int) -> torch.Tensor:
        packed = right(logits, choices, most)
        packed[0, 2] ^= choices.given is not None
        return packed

    monkeypatch.setattr(self_test, "choose_by", logprob)
    names = "sampling", "log-probabilities"
    some, choices = list(self_test.tried(256)), {name: self_test._choices(500)[name] for name in names}
    few = [one for one in some if one.name.startswith(("norm", "rotation", "sum", "gate"))]
    monkeypatch.setattr(self_test, "tried", lambda inputs, rules: few)
    monkeypatch.setattr(self_test, "_choices", lambda vocabulary: choices)
    with small_sections():
        found = self_test.different(device, 256, 500)
    rotations = [
        f"rotation and cache, {of}{what}" for of in ("float32", "bfloat16") for what in ("", ", queries alone")
    ]
    assert found == ["norm", "norm", "norm at least"] * 2 + rotations + ["log-probabilities"]
