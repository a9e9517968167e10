"""Prepares models for packed passes: rewrites them, allocates their caches, probes the target.

This is the slow part, done once: several engines can share prepared models, one generating at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from detgen.errors import EngineError
from detgen.kernels.attention import AttentionTraits
from detgen.passes.adapter import Layout, PlainDecoder, attach, attend_current
from detgen.passes.census import take_census
from detgen.passes.depth import check_depth, depth_of
from detgen.passes.forward import Decoder, Forward
from detgen.passes.kv_cache import KVCache
from detgen.passes.lean_decoder import lean_decoder
from detgen.passes.loading import LoadedModel, explained
from detgen.passes.memory import check_room, free_memory
from detgen.passes.native_decoder import NativeDecoder, is_native, runs_natively
from detgen.passes.packing import FREE_SHAPES, READ_ROWS, Shapes
from detgen.passes.pages import PAGE, Pages
from detgen.passes.probing import ProbeReport, has_experts, probe, reference_logits
from detgen.passes.refusing import refusing
from detgen.passes.replacing import replace_modules
from detgen.passes.replaying import replaying
from detgen.passes.rewriting import align_activations, fuse_norms, prepack_experts, prepack_linears
from detgen.passes.thinker import SLOTS, Block, Thinker, one_layer
from detgen.passes.thinking import Thinking
from detgen.progress import Observer, Unobserved
from detgen.thinking.modeling import ThinkingStatesForCausalLM

_ROOM = 384  # MiB that libraries take while a small model is probed, KV buffers included
_NOT_COMPILED = (
    "detgen was installed without a C compiler: passes run by torch's operators, slower, and give the same bytes "
    "on this machine only"
)
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
        probe: the result of the probe; not row-invariant either if T or C of a thinking target are not.
        thinking: thoughts and states of the slots if the target is a thinking model, whose backbone its passes run;
            else None.
    """

    target: LoadedModel
    draft: LoadedModel | None
    passes: tuple[Forward, ...]
    pages: Pages
    shapes: Shapes
    probe: ProbeReport
    thinking: Thinking | None = None

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all caches together."""
        return sum(p.cache.entry_bytes for p in self.passes)


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
    if device.type == "cuda" and has_experts(target.model):
        raise EngineError(
            f"{target.name} has experts, whose products on CUDA nothing has shown to leave rows alone; use --device cpu"
        )
    models = [target] + ([draft] if draft else [])
    check_room(_ROOM, "probe a model")
    if device.type == "cpu" and not runs_natively(device):
        observer.message(_NOT_COMPILED)
    observer.stage(f"probing {target.name}")
    backbones = [_backbone(m.model) for m in models]
    # Some settings turn out to be impossible in a model's first pass only.
    with explained(target.name):
        reference = reference_logits(backbones[0], target.vocabulary, target.dtype, target.bits, target.read)
    layouts = []
    for loaded, model in zip(models, backbones, strict=True):
        with explained(loaded.name):
            layouts.append(attach(model, loaded.name))
    with explained(target.name):
        depth = depth_of(target, backbones[0], layouts[0])
    held = sum(
        KVCache.position_bytes(layout.cached, _cached(m, device)) for m, layout in zip(models, layouts, strict=True)
    )
    pages = Pages(_page_count(device, kv_memory, held), kept=_KEPT_PAGES if device.type == "cpu" else None)
    passes = tuple(
        _passes(m, model, layout, pages, device) for m, model, layout in zip(models, backbones, layouts, strict=True)
    )
    size, allowed = target.vocabulary, allow_nondeterministic
    asked = layouts[0].traits, size, target.dtype
    with refusing(_kind(target.name, backbones[0])):
        shapes, report = _class(target.name, passes[0], reference, *asked, allowed=allowed)
        if depth is not None:
            check_depth(passes[0], depth, shapes, target.dtype)
    thinking = None
    if isinstance(target.model, ThinkingStatesForCausalLM):
        blocks = (
            _block(target, part, letter, device, allowed=allowed)
            for part, letter in ((target.model.thinker, "T"), (target.model.compressor, "C"))
        )
        thinker = Thinker(target.model.config, *blocks)
        alike = all(block.probe.row_invariant for block in (thinker.writer, thinker.compressor))
        report = replace(report, row_invariant=report.row_invariant and alike)
        thinking = passes[0].thinking = Thinking(thinker, pages, device)
        passes[0].model.concurrent = False  # the threads would share the thinker
    if draft:
        observer.stage(f"timing {draft.name}")
        with refusing(_kind(draft.name, backbones[1])):
            passes[1].learn_cost(batch_size)
    return Prepared(target, draft, passes, pages, shapes, report, thinking)


def _kind(name: str, model: PreTrainedModel) -> str:
    return f"{name} ({type(model).__name__})"


def _backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a thinking model; any other model itself."""
    if not isinstance(model, ThinkingStatesForCausalLM):
        return model
    backbone: PreTrainedModel = model.backbone
    return backbone


def _block(target: LoadedModel, part: Any, letter: str, device: torch.device, *, allowed: bool) -> Block:
    """T or C of a thinking model, given as its part of that and by its letter; other arguments as in `prepare`.

    Raises:
        EngineError: if it is not row-invariant.
    """
    name, size = f"{letter} of {target.name}", target.vocabulary
    with explained(name):
        decoder = one_layer(target.model, part)
        reference = reference_logits(decoder, size, target.dtype, target.bits)
        layout = attach(decoder, name)
    forward = _passes(target, decoder, layout, Pages(SLOTS), device)
    return Block(forward, *_class(name, forward, reference, layout.traits, size, target.dtype, allowed=allowed))


def _passes(loaded: LoadedModel, model: PreTrainedModel, layout: Layout, pages: Pages, device: torch.device) -> Forward:
    """The passes of a decoder, of a loaded model, whose attention is attached; its modules are replaced."""
    native = runs_natively(device)
    cache = KVCache(layout.cached, pages, _cached(loaded, device), device, native=native)
    if native and loaded.dtype == torch.float32:
        if is_native(model):
            return Forward(NativeDecoder(model, cache, layout.traits, loaded.bits, loaded.read), cache, layout.group)
        if not getattr(model, "is_quantized", False):
            with refusing(_kind(loaded.name, model)):
                replace_modules(model, layout.uncalled)
            return Forward(PlainDecoder(model, native=True), cache, layout.group)
    if device.type == "cuda" and (forward := _on_cuda(model, cache, layout)) is not None:
        return forward
    return Forward(lean_decoder(model, attend_current, layout.traits) or _plain_decoder(model), cache, layout.group)


def _on_cuda(model: PreTrainedModel, cache: KVCache, layout: Layout) -> Forward | None:
    """Passes by kernels in Triton, whole ones or those of the model's own forward; None where there is no Triton.

    Where there is no CUDA, as in tests, PyTorch's operators stand in for the kernels.
    """
    try:
        from detgen.kernels.triton.kernels import REFERENCE, TRITON
        from detgen.passes import cuda_decoder, cuda_modules
        from detgen.passes.cuda_attention import CudaAttention
    except ImportError:
        return None
    kernels = REFERENCE if torch.version.cuda is None else TRITON
    decoder: Decoder | None = cuda_decoder.cuda_decoder(
        model, cache, layout.traits, kernels, replaying(cache.keys[0].device)
    )
    if decoder is None:
        cuda_modules.replace_modules(model, kernels)
        decoder = PlainDecoder(model, kernels=kernels)
    return Forward(decoder, cache, layout.group, CudaAttention(cache, kernels))


def _cached(loaded: LoadedModel, device: torch.device) -> torch.dtype:
    """Number format of a model's keys and values: the native attention's is float32."""
    return torch.float32 if runs_natively(device) else loaded.dtype


def _class(
    name: str,
    forward: Forward,
    reference: torch.Tensor,
    traits: Sequence[AttentionTraits],
    size: int,
    dtype: torch.dtype,
    *,
    allowed: bool,
) -> tuple[Shapes, ProbeReport]:
    """The shapes of canonical passes, and the report of the probe.

    Raises:
        EngineError: if the passes are not row-invariant and that is not allowed.
    """
    why = "on this device: in passes of any size a row's bits depend on the others"
    model, refused = forward.model, False
    if isinstance(model, PlainDecoder) and model.native:
        model.census = take_census(forward, size)
        refused = bool(model.census.refused)
        why = f"by its own forward: {model.census.refused}" if refused else why
        if refused and not allowed:
            raise _not_row_invariant(name, why)
    shapes, report = probe(forward, reference, traits, size, dtype)
    if shapes is None and _computes_linears(model):
        shapes, report = probe(forward, reference, traits, size, dtype)
    if shapes is None or refused:
        if not allowed:
            raise _not_row_invariant(name, why)
        shapes, report = replace(FREE_SHAPES, rows=(1, READ_ROWS)), replace(report, row_invariant=False)
    return shapes, report


def _computes_linears(model: Any) -> bool:
    """Where linear layers are left to a vendor's kernels, take our own, which are slower, and say that it is done."""
    kernels = getattr(model, "kernels", None)
    if kernels is None or kernels.own_linear is None or kernels.linear is kernels.own_linear:
        return False
    model.compute_with(kernels._replace(linear=kernels.own_linear))
    return True


def _not_row_invariant(name: str, why: str) -> EngineError:
    return EngineError(
        f"{name} is not row-invariant {why}. Its outputs would depend on the batch; "
        "--allow-nondeterministic runs it without the guarantee"
    )


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
