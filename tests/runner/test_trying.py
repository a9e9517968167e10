"""A CUDA device is used once its kernels have the bits of the compiled library, which is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from detgen.errors import EngineError
from detgen.kernels.triton import core_linear, launching, self_test
from detgen.machine import Device
from detgen.program.storage import Storage
from detgen.runner import trying
from detgen.runner.trying import trusted

DEVICE = Device("cuda", 0)


class Said:
    """An observer that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stage(self, text: str) -> None: ...

    def progress(self, progress: object) -> None: ...


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str] | Exception], list[int]]:
    """Has kernels differ in something, or fail: how often they have been tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def made(different: list[str] | Exception) -> list[int]:
        times: list[int] = []

        def tried(device: Device) -> list[str]:
            times.append(1)
            if isinstance(different, Exception):
                raise different
            return different

        monkeypatch.setattr(self_test, "different", tried)
        return times

    return made


def test_a_device_is_tried_once(trial: Callable[[list[str]], list[int]], said: Said) -> None:
    times = trial([])
    assert trusted(DEVICE, said, named=True) == DEVICE
    assert said.messages == ["trying a GPU: its kernels are compared with the processor's, bit by bit"]
    assert trusted(DEVICE, said, named=False) == DEVICE
    assert len(times) == 1
    assert len(said.messages) == 2
    assert said.messages[1].startswith("--device auto took a GPU, whose kernels passed their self-test.")


def test_a_device_with_other_bits_is_not_used(trial: Callable[[list[str]], list[int]], said: Said) -> None:
    times = trial(["norm", "gate", "sum", "copy", "take"])
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"^a GPU is not used: .* \(norm, gate, sum and 2 more\); use --device cpu"
        ):
            trusted(DEVICE, said, named=True)
    assert trusted(DEVICE, said, named=False).type == "cpu"
    assert said.messages[-1].startswith("--device auto leaves a GPU alone: its kernels have other bits than")
    assert len(times) == 1


def test_a_rule_of_tensor_cores_is_that_of_the_device(
    trial: Callable[[list[str]], list[int]], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is refused by the name of the one that fits; what is wrong with it concerns no other numerics."""
    trial(["gated linear, tc25"])
    monkeypatch.setattr(core_linear, "INTERPRETED", False)
    assert trusted(DEVICE, said, named=True) == DEVICE
    with pytest.raises(EngineError, match=r"other bits than the processor's \(gated linear, tc25\); use --device cpu"):
        trusted(DEVICE, said, named=True, rule="tc25")
    why = "its tensor cores do not add up by tc24, but by tc25: --dtype bfloat16-tc25 fits it"
    with pytest.raises(EngineError, match=f"^a GPU is not used: {why}; use --device cpu"):
        trusted(DEVICE, said, named=True, rule="tc24")
    assert trusted(DEVICE, said, named=False, rule="tc24").type == "cpu"
    assert said.messages[-1].startswith(f"--device auto leaves a GPU alone: {why}")


def test_whose_rule_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for of in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=of: of)
        found.append(core_linear.rule_of("cuda"))
    assert found == [*2 * [Storage.TC24], *3 * [Storage.TC25]]


def test_a_trial_that_fails_is_no_verdict(trial: Callable[[Exception], list[int]], said: Said) -> None:
    times = trial(RuntimeError("no such instruction\nmore"))
    with pytest.raises(EngineError, match=r"cannot be tried \(no such instruction\); use --device cpu"):
        trusted(DEVICE, said, named=True)
    assert trusted(DEVICE, said, named=False).type == "cpu"
    assert len(times) == 2


@pytest.mark.parametrize("change", ["code", "versions", "kind", "damage"])
def test_whatever_the_bits_depend_on_makes_a_new_trial(
    trial: Callable[[list[str]], list[int]], said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    times = trial([])
    trusted(DEVICE, said, named=True)
    if change == "code":
        monkeypatch.setattr(trying, "_code", lambda: b"other")
    elif change == "versions":
        monkeypatch.setattr(launching, "versions", lambda: {"triton": "0"})
    elif change == "kind":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    else:
        (file,) = (tmp_path / "detgen" / "devices").iterdir()
        file.write_text("{")
    trusted(DEVICE, said, named=True)
    assert len(times) == 2
