"""The self-test of a device: it runs every kind of step, passes what is right and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from detgen.kernels.triton import runner, self_test
from detgen.program import steps
from detgen.program.operands import Activation
from detgen.program.storage import Storage

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_every_kernel_is_tried() -> None:
    made = [step for one in self_test.tried(256) for step in one.made]
    assert {type(step) for step in made} == set(runner.KERNELS)
    stored = {step.weight.storage for step in made if isinstance(step, steps.Linear)}
    assert stored == set(Storage)
    assert {step.function for step in made if isinstance(step, steps.Activate)} == set(Activation)


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
    right = self_test.logprobs
    monkeypatch.setattr(self_test, "logprobs", lambda *a: right(*a) * (1 - 2**-23))
    some, choices = list(self_test.tried(256)), self_test._choices(500)
    few = [one for one in some if one.name.startswith(("norm", "rotation", "sum", "gate"))]
    monkeypatch.setattr(self_test, "tried", lambda inputs: few)
    monkeypatch.setattr(self_test, "_choices", lambda vocabulary: {"sampling": choices["sampling"]})
    with small_sections():
        found = self_test.different(device, 256, 500)
    rotations = [
        f"rotation and cache, {of}{what}" for of in ("float32", "bfloat16") for what in ("", ", queries alone")
    ]
    assert found == ["norm", "norm", "norm at least"] * 2 + rotations + ["log-probabilities"]
