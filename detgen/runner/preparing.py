"""Prepares models for packed passes: rewrites them, allocates their caches, compares them with their own forward.

This is the slow part, done once: several engines can share prepared models, one generating at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.decoder import Narrowed, StateShape
from detgen.machine import Device
from detgen.models.description import has_description, unknown_in
from detgen.models.explained import explained
from detgen.models.loaded import LoadedModel
from detgen.models.memory import check_room, free_memory, room_beside
from detgen.models.own_forward import Layout, OwnForward
from detgen.models.program_builder import ProgramBuilder
from detgen.models.refusing import refusing
from detgen.program.arrays import FLOAT32, tensor
from detgen.progress import Observer, Unobserved
from detgen.runner.block_manager import PAGE, BlockManager
from detgen.runner.comparing import compared
from detgen.runner.depth import ROOM
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner
from detgen.runner.reference import check_reference, reference_logits
from detgen.runner.snapshots import Snapshots
from detgen.runner.state_cache import StateCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from detgen.runner.slot_thoughts import Thinking
    from detgen.runner.thinker import Block

_ROOM = 384  # MiB that libraries take while a small model is prepared, KV buffers included
_LEAST_BYTES = 64  # least bytes of a position, even if no layer keeps keys, since pages are counted anyway
# On a CPU, the limit of pages with content that are not in use, 16,384 positions: touched pages stay taken from the
# machine, and memory must not grow with the number of prompts.
_KEPT_PAGES = 256
_LEAST = ROOM * PAGE  # least positions of the caches
# Snapshots of states take at most one part in this many of the memory for the caches, and there are at most this many:
# the pages that are kept hold the beginnings of no more prompts.
_SNAPSHOT_PART, _MOST_SNAPSHOTS = 8, 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prepared models on which an engine is built.

    Attributes:
        target: the target model.
        draft: the draft model, if there is one.
        runners: the target's runner, then the draft model's.
        pages: pages of their caches.
        thinking: thoughts and states of the slots if the target thinks, in which case its passes run its backbone; else
            None.
        narrowed: the target with its weights in fewer bits, to draft for itself; None if it cannot, or memory is short.
        snapshots: snapshots of states that layers of the target keep; None if no layer keeps any, or there is no room.
    """

    target: LoadedModel
    draft: LoadedModel | None
    runners: tuple[ModelRunner, ...]
    pages: BlockManager
    thinking: Thinking | None = None
    narrowed: Narrowed | None = None
    snapshots: Snapshots | None = None

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """Number format of keys and values."""
        return self.runners[0].cache.dtype

    @property
    def shares(self) -> bool:
        """Whether prompts can share their beginnings: no layer keeps states, or there are snapshots of them."""
        return self.runners[0].cache.states is None or self.snapshots is not None

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all caches together."""
        return max(sum(p.cache.entry_bytes for p in self.runners), _LEAST_BYTES)

    def check_states(self, batch_size: int) -> None:
        """Refuse more requests at a time than before if there is no memory for their states.

        Raises:
            EngineError: if there is none.
        """
        runner, states = self.runners[0], self.runners[0].cache.states
        if states is not None and batch_size > states.slots:
            _state_bytes(self.target.name, states.shapes, batch_size, runner.device)


def prepare(
    target: LoadedModel,
    draft: LoadedModel | None,
    device: Device,
    *,
    batch_size: int,
    kv_memory: int | None,
    kv_dtype: np.dtype[Any] = FLOAT32,
    drafts_itself: bool = True,
    observer: Observer | None = None,
) -> Prepared:
    """Rewrite models for packed passes, in place, allocate their caches, and compare the target with its own forward.

    Args:
        target: the target model.
        draft: the draft model, if there is one.
        device: device of both.
        batch_size: most requests at a time; the draft model's passes are timed with that many rows.
        kv_memory: bytes for the KV caches; None takes a share of the free memory.
        kv_dtype: number format of the KV caches, float32 or bfloat16.
        drafts_itself: whether the target should draft for itself, if it can.
        observer: receives progress.

    Raises:
        EngineError: if a model is not supported, the target is not row-invariant, or the memory is too small.
    """
    observer = observer or Unobserved()
    models = [target] + ([draft] if draft else [])
    check_room(_ROOM, "prepare a model")
    observer.stage(f"preparing {target.name}")
    backbones = [m.backbone for m in models]
    unknown = [None if m.own is not None else unknown_in(model) for m, model in zip(models, backbones, strict=True)]
    own = []
    for m, model, what in zip(models, backbones, unknown, strict=True):
        with _naming(what):
            own.append(_own_forward(m, model, compared=m is target))
    layouts = [told.layout for told in own]
    _check_states(models, layouts)
    held = max(sum(KVCache.position_bytes(layout.cached, kv_dtype) for layout in layouts), _LEAST_BYTES)
    beside = sum(m.packed_bytes for m in models) if device.type == "cuda" else 0
    beside += (states := _state_bytes(target.name, layouts[0].states, batch_size, device))
    kept = _KEPT_PAGES if device.type == "cpu" else None
    count, copies = _counts(device, kv_memory, held, beside, Snapshots.bytes(layouts[0].states))
    pages = BlockManager(count, kept=kept)
    made = []
    for m, model, layout, what in zip(models, backbones, layouts, unknown, strict=True):
        with _naming(what):
            made.append(_runner(m, model, layout, pages, device, kv_dtype, batch_size, drafts=m is not target))
    runners = tuple(made)
    with _naming(unknown[0]), refusing(_kind(target.name, backbones[0])):
        own[0] = compared(_in_float32(runners[0], layouts[0]), own[0], target)
    for loaded, told in zip(models, own, strict=True):
        if loaded.keep is not None:
            loaded.keep(told)
    thinking = None
    if (model := target.thinking) is not None:
        from detgen.runner.slot_thoughts import Thinking
        from detgen.runner.thinker import Thinker

        blocks = (
            _block(target, part, letter, device, kv_dtype)
            for part, letter in ((model.thinker, "T"), (model.compressor, "C"))
        )
        thinking = runners[0].thinking = Thinking(Thinker(model.config, *blocks), pages, device)
    snapshots = None
    if copies and (kept_states := runners[0].cache.states) is not None:
        snapshots = Snapshots(kept_states, pages, copies, device)
        states += copies * Snapshots.bytes(layouts[0].states)
    if draft:
        observer.stage(f"timing {draft.name}")
        with refusing(_kind(draft.name, backbones[1])):
            runners[1].learn_cost(batch_size)
    narrowed = runners[0].decoder.narrowed()
    if narrowed is not None and narrowed.copies > room_beside(device, pages.count * PAGE * held + states):
        if drafts_itself:
            size = narrowed.copies / 2**20
            observer.message(
                f"no memory for {target.name} in fewer bits ({size:,.0f} MiB): it does not draft for itself"
            )
        narrowed = None
    return Prepared(target, draft, runners, pages, thinking, narrowed, snapshots)


def _kind(name: str, model: PreTrainedModel) -> str:
    return f"{name} ({type(model).__name__})"


def _own_forward(loaded: LoadedModel, model: PreTrainedModel, *, compared: bool) -> OwnForward:
    """Return the results of a model's own forward, new or kept; arguments and errors as for `ask`."""
    if loaded.own is not None:
        return loaded.own
    from detgen.runner.own_forward import ask  # with transformers' models, whose import takes seconds

    return ask(loaded, model, compared=compared)


@contextmanager
def _naming(unknown: str | None) -> Iterator[None]:
    """If a model of a known family is refused by its own forward, add why it cannot run like others of the family."""
    try:
        yield
    except EngineError as error:
        if unknown is None:
            raise
        raise EngineError(
            f"{error}. detgen's own pass, by which others of its family run, does not know {unknown}"
        ) from error


def _block(target: LoadedModel, part: Any, letter: str, device: Device, dtype: np.dtype[Any]) -> Block:
    """Prepare T or C of a thinking model, given as a part of the model and by its letter.

    Raises:
        EngineError: if it is not row-invariant.
    """
    from detgen.models.attaching import attach
    from detgen.runner.thinker import SLOTS, Block, one_layer

    name = f"{letter} of {target.name}"
    with explained(name):
        decoder = one_layer(target.model, part)
        reference = reference_logits(decoder, target.vocabulary, target.form)
        layout = attach(decoder, name)
    runner = _runner(target, decoder, layout, BlockManager(SLOTS), device, dtype)
    check_reference(_in_float32(runner, layout), reference, target.vocabulary)
    return Block(runner)


def _in_float32(runner: ModelRunner, layout: Layout) -> ModelRunner:
    """Return the same passes over a cache in float32, so that they can be compared with another forward."""
    if runner.cache.dtype == FLOAT32:
        return runner
    states = StateCache(layout.states, 1, runner.device) if layout.states else None
    cache = KVCache(layout.cached, BlockManager(ROOM), FLOAT32, runner.device, states)
    return ModelRunner(runner.decoder.over(cache), cache, layout.group)


def _runner(
    loaded: LoadedModel,
    model: PreTrainedModel,
    layout: Layout,
    pages: BlockManager,
    device: Device,
    dtype: np.dtype[Any],
    slots: int = 1,
    *,
    drafts: bool = False,
) -> ModelRunner:
    """Return the passes of a loaded model's decoder whose attention is attached; its modules are replaced.

    If layers keep states, there is room for those of `slots` slots. A decoder that drafts need not be row-invariant.

    Raises:
        EngineError: if it is not row-invariant, there are no kernels for it, or memory is too small.
    """
    if device.type == "cuda":
        return _on_cuda(loaded, model, layout, pages, device, dtype, slots)
    states = StateCache(layout.states, slots, device) if layout.states else None
    cache = KVCache(layout.cached, pages, dtype, device, states)
    if has_description(model):
        programs = ProgramBuilder(model, cache, layout.traits, loaded.packed_form, loaded.read)
        return ModelRunner(CDecoder(programs), cache, layout.group)
    from detgen.kernels.generic.generic_decoder import GenericDecoder
    from detgen.models.replacing import replace_modules
    from detgen.runner.census import take_census

    with refusing(_kind(loaded.name, model)):
        replace_modules(model, layout.uncalled)
    decoder = GenericDecoder(model, cache)
    runner = ModelRunner(decoder, cache, layout.group)
    if not drafts:
        with refusing(_kind(loaded.name, model)):
            decoder.census = take_census(decoder, runner, loaded.vocabulary)
        if why := decoder.census.refused:
            raise EngineError(
                f"{loaded.name} is not row-invariant by its own forward: {why}. Its outputs would depend on the batch"
            )
    return runner


def _on_cuda(
    loaded: LoadedModel,
    model: PreTrainedModel,
    layout: Layout,
    pages: BlockManager,
    device: Device,
    dtype: np.dtype[Any],
    slots: int = 1,
) -> ModelRunner:
    """Return the passes of a decoder by Triton kernels, with its weights on the device; arguments as for `_runner`.

    Raises:
        EngineError: if it has no description, there is no Triton, or the device has too little memory.
    """
    if not has_description(model):
        raise EngineError(
            f"{_kind(loaded.name, model)} has no description yet, so CUDA cannot run it; use --device cpu"
        )
    import torch

    try:
        from detgen.kernels.triton.replaying import replaying
        from detgen.kernels.triton.triton_decoder import TritonDecoder
    except ImportError as error:
        raise EngineError(
            f"detgen computes on CUDA by Triton, which cannot be imported here ({error}): install triton, or use"
            " --device cpu"
        ) from error
    try:
        states = StateCache(layout.states, slots, device) if layout.states else None
        cache = KVCache(layout.cached, pages, dtype, device, states)
        on = torch.device(str(device))
        form, read = loaded.packed_form, loaded.read
        programs = ProgramBuilder(model, cache, layout.traits, form, read, lambda x: tensor(x).to(on))
        decoder = TritonDecoder(programs, cache.scratch, on, replaying(on))
    except torch.OutOfMemoryError as error:
        message = "does not fit the device's memory; give less --kv-memory, --target-quant q8, or --device cpu"
        raise EngineError(f"{loaded.name} {message}") from error
    return ModelRunner(decoder, cache, layout.group)


def _check_states(models: list[LoadedModel], layouts: list[Layout]) -> None:
    """Refuse a draft model whose layers keep states.

    Raises:
        EngineError: names it.
    """
    for model, layout in list(zip(models, layouts, strict=True))[1:]:
        if layout.states:
            raise EngineError(
                f"{model.name} keeps states of what it has read, so it cannot be a draft model; use --drafter self,"
                " ngram or none"
            )


def _state_bytes(name: str, shapes: Sequence[StateShape | None], batch_size: int, device: Device) -> int:
    """Return the bytes of the states of a model's layers.

    Raises:
        EngineError: if there is not enough memory.
    """
    found = batch_size * StateCache.slot_bytes(shapes)
    if found > max(room_beside(device, 0), 0):
        raise EngineError(
            f"no memory for the states that {name} keeps of {batch_size} requests ({found / 2**20:,.0f} MiB);"
            " give a smaller --batch-size"
        )
    return found


def _counts(
    device: Device, kv_memory: int | None, position_bytes: int, beside: int, snapshot_bytes: int
) -> tuple[int, int]:
    """Return how many pages and snapshots fit the memory, with the scratch page and bytes that are still to be taken.

    Args:
        device: device of the caches.
        kv_memory: bytes for them; None for a share of the free memory.
        position_bytes: bytes of a position.
        beside: bytes that other things are still to take.
        snapshot_bytes: bytes of a snapshot; 0 for none. On CUDA there are none.

    Raises:
        EngineError: if `kv_memory` is too small.
    """
    memory = max(free_memory(device, _ROOM) - beside, 0) if kv_memory is None else kv_memory
    held = memory // position_bytes
    if kv_memory is not None and held < _LEAST:
        raise EngineError(
            f"--kv-memory {kv_memory} bytes holds {held} positions of {position_bytes} bytes; "
            f"give at least {_LEAST * position_bytes} bytes"
        )
    snapshots = 0
    if snapshot_bytes and device.type == "cpu":
        room = min(memory // _SNAPSHOT_PART, memory - _LEAST * position_bytes)
        snapshots = min(max(room, 0) // snapshot_bytes, _MOST_SNAPSHOTS)
    return max((memory - snapshots * snapshot_bytes) // position_bytes, _LEAST) // PAGE, snapshots
