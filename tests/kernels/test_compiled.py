"""The compiled attention is taken where it was built for this processor, and done without elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from detgen import Engine
from detgen.kernels import compiled
from detgen.kernels.attention import BLOCK, AttentionTraits, attend_fused
from detgen.kernels.compiled import attend_compiled, build, can_attend
from detgen.kernels.probe import same_bits

CPU = torch.device("cpu")
BUILT = pytest.mark.skipif(build() is None, reason="the compiled attention was not built")


@BUILT
def test_what_it_takes() -> None:
    assert can_attend(CPU, torch.bfloat16, 64, 128)
    assert not can_attend(CPU, torch.float16, 64)
    assert not can_attend(CPU, torch.float32, 64, 24)
    assert not can_attend(torch.device("meta"), torch.float32, 64)


def test_other_sizes_go_to_the_fused_kernel() -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=g) for shape in ((1, 2, 4, 24), (1, BLOCK, 2, 24), (1, BLOCK, 2, 24)))
    mask = torch.zeros(1, 1, 4, BLOCK)
    assert same_bits(
        attend_compiled(q, k, v, mask, AttentionTraits(0.2)), attend_fused(q, k, v, mask, AttentionTraits(0.2))
    )


@BUILT
def test_a_row_that_is_no_number_stays_so() -> None:
    """A broken model's NaN is not lost, and stays in its row."""
    q, k = torch.ones(1, 1, 3, 16), torch.ones(1, BLOCK, 1, 16)
    q[0, 0, 1, 5] = torch.nan
    out = attend_compiled(q, k, k, torch.zeros(1, 1, 3, BLOCK), AttentionTraits(1.0))
    assert out.isnan().any(-1).tolist() == [[[False, True, False]]]


@BUILT
def test_a_build_for_another_processor_or_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library, name = compiled._library()
    assert name == build()
    monkeypatch.setattr(compiled, "_CAPABLE", {library.vector_bits(): {"another"}})
    assert compiled._library.__wrapped__() is None
    monkeypatch.setattr(compiled, "_CAPABLE", {})
    assert compiled._library.__wrapped__() is not None
    monkeypatch.setattr(compiled, "_TILE", compiled.struct.Struct("=2q"))
    assert compiled._library.__wrapped__() is None


def test_a_library_that_cannot_be_loaded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> ctypes.CDLL:
        raise OSError("built for another system")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert compiled._library.__wrapped__() is None


def test_without_it(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes an attention of torch's operators, says so, and gives the same text but for rounding."""
    prompt = "def add(a, b):\n"
    usual = engines(drafter="none", batch_size=1).generate([prompt], max_tokens=8)[0]
    monkeypatch.setattr(compiled, "_library", lambda: None)
    engine = Engine(drafter="none", batch_size=1, kv_memory=16 << 20)
    assert engine.profile()["attention"] in ("fused", "blocks")
    assert engine.generate([prompt], max_tokens=8)[0].text == usual.text
