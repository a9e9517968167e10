"""What prepared models get: one set of pages, as many as the memory holds."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from detgen import Engine
from detgen.errors import EngineError
from detgen.runner import preparing
from detgen.runner.block_manager import PAGE


def test_pages_are_what_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the batch size nor the context has a say; a draft model's cache has the target's pages."""
    asked = []
    monkeypatch.setattr(preparing, "free_memory", lambda device, besides: asked.append(besides) or 1 << 30)
    caches = [forward.cache for forward in Engine(drafter="model", batch_size=1)._prepared.runners]
    pages = caches[0].pages
    assert [cache.pages for cache in caches] == [pages, pages]
    position = sum(x.nbytes for cache in caches for x in (*cache.keys, *cache.values)) // (pages.count + 1) // PAGE
    assert pages.count == (1 << 30) // position // PAGE
    assert [cache.positions for cache in caches] == [pages.count * PAGE] * 2
    assert pages.kept == 256, "on a CPU memory does not grow with the number of prompts"
    assert asked == [384], "MiB that a limited process needs besides"


def test_memory_for_whole_pages() -> None:
    """What --kv-memory holds, in whole pages; the positions of the checks are the least."""
    with pytest.raises(EngineError, match=r"--kv-memory 1000 bytes holds 0 positions of \d+ bytes; give at least") as e:
        Engine(drafter="none", kv_memory=1000)
    least = int(str(e.value).split()[-2])
    for memory, pages in ((least, 6), (least + least // 6 - 1, 6), (least + least // 6, 7)):
        assert Engine(drafter="none", kv_memory=memory).canonical.cache.pages.count == pages


def test_cuda_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "detgen.kernels.triton.triton_decoder", None)
    monkeypatch.setattr(preparing, "has_description", lambda _: True)
    nothing: Any = None
    with pytest.raises(EngineError, match=r"computes on CUDA by Triton, .* install triton, or use --device cpu"):
        preparing._on_cuda(nothing, nothing, nothing, nothing, nothing)
