"""The contrast: a way to generate that depends on its batch is caught changing texts, one that does not is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from detgen import Engine, EngineConfig
from detgen.check import contrast as contrasting
from detgen.check.contrast import Contrast, contrast, side_by_side
from detgen.engine.request import Request
from detgen.passes.forward import Forward
from detgen.passes.packing import FREE_SHAPES, Shapes, Window

TOKENS = 8
SIZES = (1, 2, 4)


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrasting, "SIZES", SIZES)


def _ways(config: EngineConfig, engine: Engine, prompts: list[Request]) -> tuple[dict[str, Contrast], list[str]]:
    told: list[str] = []
    found = contrast(config, engine, prompts[:4], TOKENS, told.append)
    assert all(way.prompts == 4 and way.changed.keys() == set(SIZES) for way in found)
    return {way.name: way for way in found}, told


def test_fast_path_that_depends_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, engine: Engine, prompts: list[Request]
) -> None:
    """Its texts are others at sizes above 1, and the example shows both; verified texts stay as they are."""
    run = Forward.run

    def faulty(self: Forward, windows: list[Window], shapes: Shapes) -> torch.Tensor:
        logits = run(self, windows, shapes)
        return -logits if shapes is FREE_SHAPES and len(windows) > 1 else logits

    monkeypatch.setattr(Forward, "run", faulty)
    ways, told = _ways(config, engine, prompts)
    unverified = ways["detgen, fast path unverified"]
    assert unverified.changed == {1: 0, 2: 4, 4: 4}
    assert unverified.example is not None
    prompt, size, alone, batched = unverified.example
    assert prompts[0].prompt is not None
    assert prompt.endswith(prompts[0].prompt)
    assert size == 2
    assert alone != batched
    assert ways["detgen"].changed == dict.fromkeys(SIZES, 0)
    assert ways["detgen"].example is None
    assert len(told) == 3 * len(SIZES)


def test_sound_engine(config: EngineConfig, engine: Engine, prompts: list[Request]) -> None:
    """The texts of detgen are the same in each batch, and those of transformers are what detgen writes alone."""
    seen: dict[str, list[list[str]]] = {}
    generate, detgen = contrasting._transformers, contrasting._detgen

    def watched(*arguments: Any) -> Any:
        way = generate(*arguments)
        return lambda rows, size: _kept(seen, "transformers", way(rows, size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrasting, "_transformers", watched)
        patch.setattr(
            contrasting,
            "_detgen",
            lambda *a, verified: _kept(seen, f"detgen {verified}", detgen(*a, verified=verified)),
        )
        ways, _ = _ways(config, engine, prompts)
    assert ways["detgen"].changed == dict.fromkeys(SIZES, 0)
    alone = seen["transformers"][0]
    assert all(alone)
    # Not promised of the other ways, but no two candidates are nearly tied within so few tokens.
    assert alone == seen["detgen True"][0] == seen["detgen False"][0]
    assert all(way.changed == dict.fromkeys(SIZES, 0) for way in ways.values())


def _kept(seen: dict[str, list[list[str]]], name: str, texts: list[str]) -> list[str]:
    seen.setdefault(name, []).append(texts)
    return texts


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        ("same start, then one", "same start, then two", ("same start, then |one", "same start, then |two")),
        ("ends", "ends later", ("ends|", "ends| later")),
        ("", "all", ("|", "|all")),
        ("same", "same", ("same|", "same|")),
        ("x" * 100 + "a" * 100, "x" * 100 + "b" * 100, ("x" * 40 + "|" + "a" * 60, "x" * 40 + "|" + "b" * 60)),
    ],
)
def test_side_by_side(a: str, b: str, shown: tuple[str, str]) -> None:
    """A bar where they part, with some of what is before and behind."""
    assert side_by_side(a, b) == shown
    assert side_by_side(b, a) == shown[::-1]
