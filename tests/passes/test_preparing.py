"""What prepared models get: one set of pages, as many as the memory holds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.torch_passes import decoders
from torch import nn

from detgen import Engine, EngineConfig
from detgen.errors import EngineError
from detgen.kernels.native.library import best_build
from detgen.passes import preparing
from detgen.passes.pages import PAGE
from detgen.progress import Unobserved


def test_pages_are_what_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the batch size nor the context has a say; a draft model's cache has the target's pages."""
    asked = []
    monkeypatch.setattr(preparing, "free_memory", lambda device, besides: asked.append(besides) or 1 << 30)
    caches = [forward.cache for forward in Engine(drafter="model", batch_size=1)._prepared.passes]
    pages = caches[0].pages
    assert [cache.pages for cache in caches] == [pages, pages]
    position = sum(x.nbytes for cache in caches for x in (*cache.keys, *cache.values)) // (pages.count + 1) // PAGE
    assert pages.count == (1 << 30) // position // PAGE
    assert [cache.positions for cache in caches] == [pages.count * PAGE] * 2
    assert pages.kept == 256, "on a CPU memory does not grow with the number of prompts"
    assert asked == [384], "MiB that a limited process needs besides"


def test_experts_are_refused_on_cuda() -> None:
    """Nothing there proves their products, which the probe leaves out."""
    mixture = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})})
    target: Any = SimpleNamespace(name="a mixture", model=mixture)
    settings: Any = {"batch_size": 1, "kv_memory": None, "allow_nondeterministic": True}
    with pytest.raises(EngineError, match=r"a mixture has experts, .* use --device cpu"):
        preparing.prepare(target, None, torch.device("cuda"), **settings)


def test_memory_for_whole_pages() -> None:
    """What --kv-memory holds, in whole pages; the probe's positions are the least."""
    with pytest.raises(EngineError, match=r"--kv-memory 1000 bytes holds 0 positions of \d+ bytes; give at least") as e:
        Engine(drafter="none", kv_memory=1000)
    least = int(str(e.value).split()[-2])
    for memory, pages in ((least, 6), (least + least // 6 - 1, 6), (least + least // 6, 7)):
        assert Engine(drafter="none", kv_memory=memory).canonical[0].cache.pages.count == pages


class _Listener(Unobserved):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)


@pytest.mark.parametrize("kind", ["native", "lean"])
def test_without_a_compiler(engines: Callable[..., Engine], kind: str) -> None:
    """Torch's operators are taken, one line and the profile say so, and the text is the same but for rounding."""
    prompt, listener = "def add(a, b):\n", _Listener()
    usual = engines(drafter="none", batch_size=1).generate([prompt], max_tokens=8)[0]
    with decoders(kind):
        engine = Engine(EngineConfig(drafter="none", batch_size=1, kv_memory=16 << 20), observer=listener)
    compiled = kind == "native" and best_build() is not None
    assert [("without a C compiler" in line, "\n" in line) for line in listener.told] == [(True, False)] * (
        not compiled
    )
    assert engine.profile()["arithmetic"] == ("detgen-1" if compiled else "torch")
    if not compiled:
        assert engine.profile()["attention"] in ("fused", "blocks")
    assert engine.generate([prompt], max_tokens=8)[0].text == usual.text
