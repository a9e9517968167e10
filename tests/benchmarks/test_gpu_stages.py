"""What the stages of the suite for a GPU conclude: that a kernel is wrong, how long a call takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import bytes as gpu_bytes
from gpu import timing
from gpu.generations import workloads
from gpu.kernels import compare
from gpu.notebook import Asked, Notebook
from gpu.passes import build, decode
from gpu.steps import made

SETTINGS = Asked("kernels", "tiny", tiny=True)


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_with_other_bits_is_found(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from detgen.kernels.triton import runner

    one = next(one for one in made(SETTINGS, 70) if one.name == "norm")
    if broken:
        compute = runner.KERNELS[type(one.step)]
        spoil = lambda step, of: (compute(step, of), of[step.writes].mul_(1 + 2**-23))  # noqa: E731
        monkeypatch.setitem(runner.KERNELS, type(one.step), spoil)
    book = Notebook(tmp_path / "part.json")
    with book.part("kernel"):
        compare(book, one, 3, 70, "cpu")
    assert len(book.failed) == broken


def test_a_model_is_ready_for_passes() -> None:
    built = build(SETTINGS, 2)
    assert built.slots >= 2
    assert decode(built, 2).lengths.tolist() == [1, 1]


@pytest.mark.parametrize("other", [None, "q8"])
def test_a_run_with_other_bytes_is_found(other: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bytes, "digest_of", lambda _f, device, q, drafter, _t: f"{q} {q == other and drafter}")
    book = Notebook(tmp_path / "part.json")
    gpu_bytes.measure(book, SETTINGS)
    assert [line.partition(":")[0] for line in book.failed] == ([f"{other}, none"] if other else [])


def test_mixed_lengths_have_the_tokens_of_equal_ones() -> None:
    made = workloads(8, 512, 128, 1000)
    equal, mixed = ([(len(p.tokens), p.output) for p in made[name]] for name in ("equal", "mixed"))
    assert set(equal) == {(512, 128)}
    assert len(set(mixed)) == 4
    assert [sum(column) for column in zip(*mixed, strict=True)] == [sum(column) for column in zip(*equal, strict=True)]


class FakeEvent:
    """An event of a clock that counts calls."""

    calls = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = FakeEvent.calls

    def synchronize(self) -> None:
        """All is done already."""

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize("held_back", [True, False])
def test_times_on_a_device_are_of_a_call(held_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        FakeEvent.calls += 1

    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(timing, "_wake", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    if not held_back:
        monkeypatch.delattr(torch.cuda, "_sleep")
    assert timing.device_seconds(call) == 1
    assert len(cycles) == (timing._ROUNDS if held_back else 0)
    assert all(0 < n <= timing._CYCLES * timing._LONG for n in cycles)
