"""Kernels run on the GPU, and where there is none in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _patched_once() -> Iterator[None]:
    """Have Triton's interpreter patch `triton.language` when a kernel is launched, not in each call of a function too.

    It spends a third of its time on that. The first call of a function still patches, since the functions of
    `triton.language` itself need more than kernels do; what they need is never undone.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    patch, known = interpreter._patch_lang, interpreter.InterpretedFunction.rewritten_fn
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", lambda fn: None if fn in known else patch(fn))
        yield


@contextmanager
def _small_sections() -> Iterator[None]:
    from detgen.kernels.triton import filter_kernels, likely_tokens, row_reading, sampling_kernels

    with pytest.MonkeyPatch.context() as patch:
        for module in (filter_kernels, likely_tokens, row_reading, sampling_kernels):
            patch.setattr(module, "SECTION", 256)
        patch.setattr(filter_kernels, "_TILE", 256)
        patch.setattr(sampling_kernels, "_TILE", 128)
        yield


@pytest.fixture(scope="session")
def small_sections() -> Callable[[], AbstractContextManager[None]]:
    """Within it, a few hundred logits are several sections, and several tiles of each."""
    return _small_sections
