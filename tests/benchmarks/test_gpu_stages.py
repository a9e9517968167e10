"""What the stages of the suite for a GPU conclude: that a kernel is wrong, which row counts agree, what a trace has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import timing
from gpu.generations import workloads
from gpu.kernels import compare
from gpu.notebook import Asked, Notebook
from gpu.products import Classes, Product, classes, in_words, spans
from gpu.steps import made
from gpu.trace import summary

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


def test_classes_of_row_counts() -> None:
    """Of a product whose sums have another order from four rows on, and from nine on another one at odd places."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        one = x[:, :1] * 1
        if len(x) >= 9:
            return one + (torch.arange(len(x))[:, None] % 2)
        return one + 2 * (len(x) >= 4)

    product = Product(compute, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    found = classes(product, (1, 3, 4, 8, 9))
    assert found == Classes([[1, 3], [4, 8], [9]], [9])
    ladder = (1, 3, 4, 8, 9)
    assert in_words(found, ladder) == "1-3 | 4-8 | 9; a row's place matters at 9"
    assert in_words(Classes([[1, 3, 4, 8, 9]], [3, 9]), ladder) == "one class; a row's place matters at 3 9"
    assert spans([1, 3, 8, 9], ladder) == "1-3 8-9"


def test_a_trace_in_figures() -> None:
    def event(name: str, start: float, taken: float) -> dict[str, object]:
        return {"name": name, "ts": start, "dur": taken}

    found = summary([event("b", 150, 50), event("a", 100, 20), event("a", 160, 10), event("c", 190, 30)])
    assert (found["launches"], found["span"], found["busy"]) == (4, pytest.approx(120e-6), pytest.approx(90e-6))
    assert [(name, count) for name, count, _ in found["top"]] == [("b", 1), ("a", 2), ("c", 1)]
    with pytest.raises(AssertionError, match="no event"):
        summary([])


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
    assert timing.seconds_each([call, call, call]) == 1
    assert len(cycles) == (timing._ROUNDS if held_back else 0)
    assert all(0 < n <= timing._CYCLES * timing._LONG for n in cycles)
