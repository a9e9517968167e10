"""A back end that makes whole calls as that of CUDA does, by passes of the compiled library: as fast as those, and
without Triton's interpreter. And that of CUDA itself, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from detgen import Engine, Request
from detgen.engine.sequence import Sequence
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.input_batch import InputBatch
from detgen.kernels.penalties import Adjustment
from detgen.kernels.triton import triton_decoder
from detgen.kernels.triton.replaying import Calls
from detgen.kernels.triton.row_reading import Lists
from detgen.kernels.triton.sampling_kernels import choose_reference
from detgen.kernels.triton.triton_decoder import TritonDecoder
from detgen.machine import CPU
from detgen.program.arrays import Array
from detgen.program.rows import Rows
from detgen.runner import preparing


class Foreseeing(TritonDecoder):
    """Calls of several passes, and of several rounds, are those of CUDA, but for what a pass computes.

    Args:
        own: computes it.
        scratch: see `TritonDecoder`.
    """

    def __init__(self, own: CDecoder, scratch: int) -> None:
        super().__init__(own._programs, scratch, torch.device("cpu"), Calls())
        self.own = own
        self.breaking = own.breaking  # type: ignore[method-assign]

    def _run(
        self, packed: InputBatch, exchange: Any, place: Callable[[Rows], object] | None = None, longest: int = 0
    ) -> Any:
        packed = copy(packed)
        if place is not None:
            pieces, tables = packed.by_pieces(self._sharing)
            own = packed.ids, packed.positions, packed.kv_positions, packed.wanted, tables, pieces
            rows = Rows(*map(np.copy, own), packed.spans)
            place(Rows(*(None if x is None else torch.from_numpy(x) for x in rows)))
            packed._rows = rows._replace(pieces=rows.pieces[rows.pieces[:, 2] > 0])
        self.own._programs.reach(longest)
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


def _chosen(
    logits: torch.Tensor,
    choices: Any,
    most: int = 0,
    lists: Lists | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """What kernels would choose, by the functions of a CPU."""
    if positions is not None:
        choices = replace(choices, position=positions.numpy().astype(np.uint64))
    if lists is not None:
        parts = [slice(*bound) for bound in lists.bounds.tolist()]
        told = [(lists.ids[part].numpy().astype(np.int64), lists.terms[:, part].numpy()) for part in parts]
        choices = replace(choices, adjustments=[Adjustment(ids[ids >= 0], terms[:, ids >= 0]) for ids, terms in told])
    return choose_reference(logits, choices, most)


@contextmanager
def foreseeing(engine: Engine) -> Iterator[list[int]]:
    """An engine's passes are such inside the block; the numbers that each call brings back, call by call."""
    fetched, waits, drafting = triton_decoder.fetched, list[int](), (engine._parts.model, engine._parts.own)

    def told(x: torch.Tensor) -> torch.Tensor:
        waits.append(len(x))
        return fetched(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decoder, "choose_by", _chosen)
        patch.setattr(triton_decoder, "fetched", told)
        for runner in (engine.canonical, *(drafter.runner for drafter in drafting if drafter is not None)):
            assert isinstance(runner.decoder, CDecoder)
            patch.setattr(runner, "decoder", Foreseeing(runner.decoder, runner.cache.scratch))
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


def said(engine: Engine, asked: list[Request]) -> dict[Any, Any]:
    """What each sample gives, and leaves in the cache."""
    engine.reset_prefix_cache()
    trace = Entries()
    done = [c for batch in engine.stream(asked, trace=trace) for c in batch]
    return {
        c.request.id: (
            c.token_ids,
            c.text,
            c.finish_reason,
            c.error,
            c.logprobs,
            c.records,
            trace.found.get((c.request.id, c.sample)),
        )
        for c in done
    }
