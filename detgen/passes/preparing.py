"""Prepares models for packed passes: rewrites them, allocates their caches, probes the target.

This is the slow part, done once: several engines can share prepared models, one generating at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from detgen.errors import EngineError
from detgen.passes.adapter import PlainDecoder, attach, attend_current
from detgen.passes.forward import Forward
from detgen.passes.kv_cache import KVCache
from detgen.passes.lean_decoder import lean_decoder
from detgen.passes.loading import LoadedModel, explained
from detgen.passes.memory import check_room, free_memory
from detgen.passes.packing import FREE_SHAPES, READ_ROWS, Shapes
from detgen.passes.pages import PAGE, Pages
from detgen.passes.probing import ProbeReport, probe, reference_logits
from detgen.passes.rewriting import align_activations, fuse_norms, prepack_experts, prepack_linears
from detgen.progress import Observer, Unobserved

_ROOM = 384  # MiB that libraries take while a small model is probed, KV buffers included
_LEAST_POSITIONS = 3 * 128  # the probe needs them
# On a CPU, pages that hold something but that nobody uses, 16,384 positions: what was touched stays taken from the
# machine, and memory must not grow with the number of prompts.
_KEPT_PAGES = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an engine is built on.

    Attributes:
        target: the target model.
        draft: the draft model, if there is one.
        passes: those of the target, then those of the draft model.
        pages: the pages of their caches.
        shapes: the shapes of canonical passes.
        probe: the result of the probe.
    """

    target: LoadedModel
    draft: LoadedModel | None
    passes: tuple[Forward, ...]
    pages: Pages
    shapes: Shapes
    probe: ProbeReport

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all caches together."""
        return sum(x[0].nbytes for p in self.passes for x in (*p.cache.keys, *p.cache.values))


def prepare(
    target: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    *,
    batch_size: int,
    kv_memory: int | None,
    allow_nondeterministic: bool,
    observer: Observer | None = None,
) -> Prepared:
    """Rewrite models for packed passes, in place, allocate their caches, probe the target.

    Args:
        target: the target model.
        draft: the draft model, if there is one.
        device: of both.
        batch_size: most requests at a time; the draft model's passes are timed with that many rows.
        kv_memory: bytes for the KV caches; None takes a share of the free memory.
        allow_nondeterministic: accept a target that is not row-invariant; its passes are unconstrained.
        observer: is told what is being done.

    Raises:
        EngineError: if a model is not supported, the target is not row-invariant, or the memory is too small.
    """
    observer = observer or Unobserved()
    models = [target] + ([draft] if draft else [])
    check_room(_ROOM, "probe a model")
    observer.stage(f"probing {target.name}")
    # Some settings turn out to be impossible in a model's first pass only.
    with explained(target.name):
        reference = reference_logits(target.model, target.vocabulary)
    layouts = []
    for loaded in models:
        with explained(loaded.name):
            layouts.append(attach(loaded.model, loaded.name))
    parts = list(zip(models, layouts, strict=True))
    held = sum(KVCache.position_bytes(layout.cached, m.dtype) for m, layout in parts)
    pages = Pages(_page_count(device, kv_memory, held), kept=_KEPT_PAGES if device.type == "cpu" else None)
    passes = tuple(
        Forward(
            lean_decoder(m.model, attend_current, layout.traits) or _plain_decoder(m.model),
            KVCache(layout.cached, pages, m.dtype, device),
            layout.group,
        )
        for m, layout in parts
    )
    shapes, report = probe(passes[0], reference, layouts[0].traits)
    if shapes is None:
        if not allow_nondeterministic:
            raise EngineError(
                f"{target.name} is not row-invariant on this device: in passes of any size a row's bits depend on the "
                "others. Its outputs would depend on the batch; --allow-nondeterministic runs it without the guarantee"
            )
        shapes = replace(FREE_SHAPES, rows=(1, READ_ROWS))
    if draft:
        observer.stage(f"timing {draft.name}")
        passes[1].learn_cost(batch_size)
    return Prepared(target, draft, passes, pages, shapes, report)


def _plain_decoder(model: PreTrainedModel) -> PlainDecoder:
    """The model's own forward, on modules that give a row the same bits whatever its neighbours are."""
    prepack_linears(model)
    fuse_norms(model)
    align_activations(model)
    prepack_experts(model)
    return PlainDecoder(model)


def _page_count(device: torch.device, kv_memory: int | None, position_bytes: int) -> int:
    """How many pages fit the memory, beside the scratch page.

    Raises:
        EngineError: if `kv_memory` is too small for the probe.
    """
    memory = free_memory(device, _ROOM) if kv_memory is None else kv_memory
    held = memory // position_bytes
    if kv_memory is not None and held < _LEAST_POSITIONS:
        raise EngineError(
            f"--kv-memory {kv_memory} bytes holds {held} positions of {position_bytes} bytes; "
            f"give at least {_LEAST_POSITIONS * position_bytes} bytes"
        )
    return max(held, _LEAST_POSITIONS) // PAGE
