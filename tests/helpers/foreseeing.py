"""A back end that makes whole calls as that of CUDA does, by passes of the compiled library: as fast as those, and
without Triton's interpreter. And that of CUDA itself, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from detgen import Engine
from detgen.engine.sequence import Sequence
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.penalties import Adjustment
from detgen.kernels.triton import triton_decoder
from detgen.kernels.triton.replaying import Calls
from detgen.kernels.triton.row_reading import Lists
from detgen.kernels.triton.sampling_kernels import choose_reference
from detgen.kernels.triton.triton_decoder import TritonDecoder
from detgen.machine import CPU
from detgen.program.arrays import Array
from detgen.runner import preparing


class Foreseeing(TritonDecoder):
    """Calls of several passes are those of CUDA, but for what a pass computes.

    Args:
        own: computes it.
    """

    def __init__(self, own: CDecoder) -> None:
        super().__init__(own._programs, 0, torch.device("cpu"), Calls())
        self.own = own
        self.breaking = own.breaking  # type: ignore[method-assign]

    def _run(self, packed: Any, exchange: Any, tokens: torch.Tensor | None = None) -> Any:
        if tokens is not None:
            packed.ids[: len(tokens)] = tokens.numpy()
        found: list[int] = []
        results = torch.from_numpy(np.array(self.own.run(packed, exchange, found)))
        broken = torch.zeros(len(packed.ids), dtype=torch.int8)
        broken[found] = 1
        return SimpleNamespace(results=results, broken=broken)


class Entries:
    """A trace that keeps what is cached, for whose sake nothing runs otherwise."""

    chains = True

    def __init__(self) -> None:
        self.found: dict[Any, tuple[bytes, bytes]] = {}

    def committed(self, seq: Sequence, first: int, logits: Array) -> None: ...

    def finished(self, seq: Sequence, keys: Array, values: Array) -> None:
        self.found[seq.request.id, seq.sample] = np.asarray(keys).tobytes(), np.asarray(values).tobytes()


def _chosen(logits: torch.Tensor, choices: Any, most: int = 0, lists: Lists | None = None) -> torch.Tensor:
    """What kernels would choose, by the functions of a CPU."""
    if lists is not None:
        parts = [slice(*bound) for bound in lists.bounds.tolist()]
        told = [(lists.ids[part].numpy().astype(np.int64), lists.terms[:, part].numpy()) for part in parts]
        choices = replace(choices, adjustments=[Adjustment(ids[ids >= 0], terms[:, ids >= 0]) for ids, terms in told])
    return choose_reference(logits, choices, most)


@contextmanager
def foreseeing(engine: Engine) -> Iterator[list[int]]:
    """An engine's passes are such inside the block; the numbers that each call brings back, call by call."""
    own, fetched, waits = engine.canonical.decoder, triton_decoder.fetched, list[int]()
    assert isinstance(own, CDecoder)

    def told(x: torch.Tensor) -> torch.Tensor:
        waits.append(len(x))
        return fetched(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decoder, "choose_by", _chosen)
        patch.setattr(triton_decoder, "fetched", told)
        patch.setattr(engine.canonical, "decoder", Foreseeing(own))
        yield waits


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, models are loaded for kernels in Triton, which run in the interpreter."""

    def runner(*given: Any, **_: Any) -> Any:
        loaded, model, layout, pages, _, dtype, slots = given
        return preparing._on_cuda(loaded, model, layout, pages, CPU, dtype, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_runner", runner)
        yield
