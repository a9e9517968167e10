"""Replace the attention of a transformers model by that of the pass in progress, and record its layers' shapes.

This module knows transformers' models, but no caches or requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from detgen.errors import EngineError
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.generic.paged_attention import attend_current, attending
from detgen.models.description import has_description, states_of
from detgen.models.masks import ASKING, Heads, Mask, Seen, UnknownMaskError, asking_modules
from detgen.models.own_forward import Layout
from detgen.models.refusing import refusing
from detgen.models.stored import held
from detgen.models.widened_forward import widened

ATTENTION_NAME = "detgen"
# Relative to a row's largest entry: the tolerance when other rows change, since experts round by their row counts.
_SAME = 1e-5

_IGNORED = {
    "dropout",
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "logits_to_keep",
}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention; transformers' models call this function through the AttentionInterface.

    The window argument is only for attention without a mask: the mask decides what rows see.
    """
    unknown = [name for name, value in extra.items() if isinstance(value, torch.Tensor) and name not in _IGNORED]
    if unknown or attention_mask is not None:
        what = f"its attention takes {', '.join(unknown)}" if unknown else "it brings a mask of its own"
        raise EngineError(f"{type(module).__name__} is not supported: {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    seen: Seen = module.seen  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    known = s_aux is not None and s_aux.device.type != "meta"
    sinks = tuple(s_aux.flatten().tolist()) if s_aux is not None and known else None
    return attend_current(layer, q, k, v, AttentionTraits(scale, seen.window, softcap, seen.chunk, sinks))[None], None


def _asked(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None = None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in the pass that asks for masks, of two sequences with the same last token."""
    if not isinstance(attention_mask, Mask):
        raise UnknownMaskError("its attention takes a mask that transformers does not make")
    config: Any = module.config
    module.seen = attention_mask.seen(query.shape[1], config)  # type: ignore[assignment]
    for heads in (query, key, value):
        _check_alone(heads[:, :, -1])
    out, _ = _attention(module, query, key, value, None, **how)
    return out.expand(len(query), -1, -1, -1), None


def _check_alone(rows: torch.Tensor) -> None:
    """Raise if a row depends on the rows before it other than through attention.

    Args:
        rows: the same row of two sequences that differ before it, [2, ...].

    Raises:
        NotImplementedError: if it does.
    """
    if rows.device.type == "meta":
        return
    rows = rows.nan_to_num()  # entries that are NaN in both do not differ
    if (rows[0] - rows[1]).abs().max() > _SAME * rows.abs().max():
        raise NotImplementedError("it keeps a state of what it has read, which detgen's KV cache does not hold")


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionInterface.register(ASKING, _asked)


@contextmanager
def experts_by(model: PreTrainedModel, way: str) -> Iterator[None]:
    """Inside the block, let a model compute experts in a way of transformers; "eager" is the code of the model itself.

    That has no conditions; others refuse weights whose rows do not begin at multiples of 16 bytes.
    """
    before = _set_experts(model, way)
    try:
        yield
    finally:
        _set_experts(model, before)


def _set_experts(model: PreTrainedModel, way: str | None) -> str | None:
    """Let a model compute experts in another way, if it has one, and return the way before."""
    config = model.config.get_text_config()
    before: str | None = getattr(config, "_experts_implementation", None)
    if before is not None:
        parts = getattr(model.config, "sub_configs", {})  # of a wrapper, which may have no such setting of its own
        part = next((name for name in parts if getattr(model.config, name) is config), "")
        model.set_experts_implementation({part: way})
    return before


@contextmanager
def _asking_no_numbers(model: PreTrainedModel) -> Iterator[None]:
    """Keep a model without weights from looking at numbers.

    Its experts are computed in the one way that does not, it does not look for padding to warn about, LongRoPE does not
    look at the largest position, and what it keeps besides its weights is on `meta`, too.
    """
    if model.device.type != "meta":
        yield
        return
    config = model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    stored = model.state_dict().keys()
    numbers = [
        (_parent(model, name), name.rpartition(".")[2], x) for name, x in model.named_buffers() if name in stored
    ]
    stretched = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    try:
        for module, name, x in numbers:
            module._buffers[name] = x.to("meta")
        for module in stretched:
            module.forward = partial(_turned_by_nothing, module)
        vars(config)["pad_token_id"] = None  # a configuration may refuse this value
        with experts_by(model, "batched_mm"):
            yield
    finally:
        for module, name, x in numbers:
            module._buffers[name] = x
        for module in stretched:
            vars(module).pop("forward", None)
        vars(config)["pad_token_id"] = padding


def _turned_by_nothing(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines like those of a rotary embedding, without numbers."""
    angles = x.new_zeros(*position_ids.shape, 2 * len(module.inv_freq))
    return angles, angles


def attach(model: PreTrainedModel, name: str) -> Layout:
    """Replace a model's attention by detgen's, record the layout of its layers, and find out what their rows see.

    Args:
        model: a transformers decoder.
        name: its name in messages.

    Raises:
        EngineError: if not every layer of the model takes its attention from transformers' AttentionInterface, if
            detgen's attention has no mask like that of a layer, or if rows depend on others by anything but attention.
    """
    kind = f"{name} ({type(model).__name__})"
    sizes: dict[int, tuple[int, int, int, int]] = {}
    traits: dict[int, AttentionTraits] = {}

    def note(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: AttentionTraits) -> torch.Tensor:
        if layer in sizes:
            raise NotImplementedError(f"layer {layer} has several attention modules, and detgen's KV cache keeps one")
        sizes[layer] = (q.shape[1], k.shape[1], k.shape[2], v.shape[2])
        traits[layer] = asked
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def note_heads(layer: int, found: Heads, seen: Seen) -> None:
        sizes[layer] = found.heads, found.kv_heads, found.size, found.size
        window = seen.window if found.window is None else found.window
        traits[layer] = AttentionTraits(found.scale, window, None, seen.chunk, slopes=found.slopes)

    called: set[nn.Module] = set()
    states, alone, sharing, latent = states_of(model)
    with refusing(kind), ExitStack() as hooks:
        for net in states:  # their dependence on earlier rows is known, so it is left out
            net.forward = lambda hidden_states, **_: torch.zeros_like(hidden_states)
            hooks.callback(delattr, net, "forward")
        model.set_attn_implementation(ASKING)
        if has_description(model):
            hooks.enter_context(asking_modules(model, note_heads))
            hooks.enter_context(experts_by(model, "eager"))
        else:
            _set_experts(model, "eager")  # for good, since passes run this forward
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda module, _: called.add(module)).remove)
        # Two sequences with the same last token; without an attention, it must not matter what is before it.
        ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 4]], device=next(model.parameters()).device)
        positions = torch.arange(4, device=ids.device).expand(2, 4)
        # In 16 bits, differences may be rounded away.
        wide = nullcontext() if model.device.type == "meta" else widened(model, held)
        with torch.inference_mode(), attending(note), _asking_no_numbers(model), wide:
            # With a mask of padding, transformers does not look for several sequences in a row. It has numbers even
            # where the model has none: they are looked at where layers keep states.
            mask = torch.ones(ids.shape, dtype=torch.int64, device="cpu" if ids.device.type == "meta" else ids.device)
            out = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation(ATTENTION_NAME)
    # The number of layers may be an encoder's.
    count = max([model.config.get_text_config().num_hidden_layers, *(i + 1 for i in sizes)])
    kept = {net.layer_idx: shape for net, shape in states.items()}
    missing = [i for i in range(count) if i not in sizes and i not in kept and i not in alone]
    if missing:
        which = "its layers do" if len(missing) == count else f"layers {missing} of {count} do"
        raise EngineError(
            f"{kind} is not supported: {which} not take attention from transformers' AttentionInterface, "
            "so it cannot use detgen's KV cache"
        )
    try:
        _check_alone(out[:, -1])
    except NotImplementedError as e:
        raise EngineError(f"{kind} is not supported: {e}") from e
    sizes |= {i: (sizes[i][0], 1, entries, 0) for i, entries in latent.items()}
    layers = [(0, 0, 0, 0) if i in sharing else sizes.get(i, (0, 0, 0, 0)) for i in range(count)]
    group = min((q // h for q, h, _, _ in sizes.values()), default=1)
    uncalled = {
        name for name, m in model.named_modules() if name and _parent(model, name) in called and m not in called
    }
    cached = [(h, dk, dv) for _, h, dk, dv in layers]
    stateful = tuple(kept.get(i) for i in range(count)) if kept else ()
    return Layout(cached, [traits.get(i) for i in range(count)], group, frozenset(uncalled), stateful)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
