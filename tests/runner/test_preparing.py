"""What prepared models get: one set of pages, as many as the memory holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import OWN_FORWARD

from detgen import Engine
from detgen.errors import EngineError
from detgen.program.arrays import BFLOAT16
from detgen.runner import preparing
from detgen.runner.block_manager import PAGE

PROMPTS = [[(i * i + 7 * i + n) % 58 + 2 for i in range(n)] for n in (5, 70)]


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


@pytest.mark.parametrize("target", ["embedded", "demo-thinking", "own forward"])
def test_a_cache_in_16_bits(target: str, random_model: Callable[..., Path]) -> None:
    """It holds twice as many tokens, and a row reads the same entries whether its pass wrote them or one before."""
    of: dict[str, Any] = {"drafter": "ngram", "target": target}
    if target == "embedded":
        of = {"drafter": "model"}
    elif target == "own forward":
        of["target"] = random_model(OWN_FORWARD["gemma"]())
    wide, half = (Engine(**of, kv_memory=8 << 20, kv_dtype=dtype) for dtype in ("float32", "bfloat16"))
    pages = half._prepared.pages.count
    assert pages // 2 == wide._prepared.pages.count
    assert half.position_bytes * 2 == wide.position_bytes
    runners = [*half._prepared.runners]
    if (thinking := half._prepared.thinking) is not None:
        runners += [thinking.thinker.writer.runner, thinking.thinker.compressor.runner]
    assert {x.dtype for r in runners for x in (*r.cache.keys, *r.cache.values)} == {BFLOAT16}
    assert [e.profile()["kv_dtype"] for e in (wide, half)] == ["float32", "bfloat16"]

    def told(engine: Engine, **settings: Any) -> list[Any]:
        engine.reset_prefix_cache()
        made = engine.with_settings(**settings).generate(PROMPTS, max_tokens=12)
        return [(c.token_ids, [x for record in c.records if (x := record.logprob)]) for c in made]

    found = told(half)
    assert found == told(half, drafter="none", batch_size=1, prefill_chunk=1)
    assert found == told(half, prefill_chunk=7, threads=2)
    assert found != told(wide), "entries are rounded"


def test_the_number_format_of_the_cache_follows_the_inputs() -> None:
    """Unless it is asked for."""
    for dtype, asked, kept in (
        *(("auto", "auto", "float32"), ("bfloat16", "auto", "bfloat16"), ("float16", "auto", "float32")),
        *(("bfloat16", "float32", "float32"), ("bfloat16-tc25", "auto", "bfloat16")),
    ):
        engine = Engine(drafter="none", dtype=dtype, kv_dtype=asked, kv_memory=4 << 20)
        assert engine.profile()["kv_dtype"] == kept


def test_cuda_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "detgen.kernels.triton.triton_decoder", None)
    monkeypatch.setattr(preparing, "has_description", lambda _: True)
    nothing: Any = None
    with pytest.raises(EngineError, match=r"computes on CUDA by Triton, .* install triton, or use --device cpu"):
        preparing._on_cuda(nothing, nothing, nothing, nothing, nothing, nothing)
