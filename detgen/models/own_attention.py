"""Attention that modules of transformers compute by themselves, without its AttentionInterface.

Families that have a description run by their modules' weights alone. What else there is to know of such a module, its
heads and its scores, it says itself; what its rows see, the mask says that it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from detgen.models.masks import ASKING, Mask, Seen, UnknownMaskError


class Heads(NamedTuple):
    """What a module says of itself.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        size: entries of each.
        scale: of the scores.
        slopes: of each head, see `Attend`; None for none.
        window: what its rows see, if that is less than the mask says; None for no window.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float
    slopes: tuple[float, ...] | None = None
    window: int | None = None


Note = Callable[[int, Heads, Seen], None]  # of a layer


def _bloom(module: Any) -> Heads:
    heads = int(module.num_heads)
    biases = _of(module, "build_alibi_tensor")(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    return Heads(heads, heads, module.head_dim, module.inv_norm_factor, tuple(biases[:, 0, 1].tolist()))


def _mpt(module: Any) -> Heads:
    heads = int(module.n_heads)
    slopes = tuple((-_of(module, "build_mpt_alibi_tensor")(heads, 2)[:, 0, 0]).tolist())
    return Heads(heads, heads, module.head_dim, module.softmax_scale, slopes)


def _falcon(module: Any) -> Heads:
    return Heads(module.num_heads, module.num_kv_heads, module.head_dim, module.inv_norm_factor)


def _gptj(module: Any) -> Heads:
    heads = int(module.num_attention_heads)
    before_5_24 = getattr(module, "scale_attn", None)
    return Heads(heads, heads, module.head_dim, module.scaling if before_5_24 is None else 1 / before_5_24)


def _gpt_neo(module: Any) -> Heads:
    window = module.config.window_size if module.attention_type == "local" else None
    return Heads(module.num_heads, module.num_heads, module.head_dim, 1.0, window=window)


def _of(module: Any, name: str) -> Callable[..., torch.Tensor]:
    """A function of the file that a module comes from."""
    found: Callable[..., torch.Tensor] = getattr(sys.modules[type(module).__module__], name)
    return found


# By the classes of modules.
KINDS: dict[str, Callable[[Any], Heads]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "CodeGenAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
}
# Settings that transformers does not read, so that no comparison with its forward can tell what they change.
_UNREAD: dict[str, dict[str, Any]] = {
    "MptForCausalLM": {
        **{"attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "attn_config.prefix_lm": False},
        **{"attn_config.attn_uses_sequence_id": False, "logit_scale": None},
    },
}


@contextmanager
def asking_modules(model: Any, note: Note) -> Iterator[None]:
    """Let such modules of a model note what they are, instead of computing anything, when a pass asks for masks."""
    for name, value in _UNREAD.get(type(model).__name__, {}).items():
        if (found := attrgetter(name)(model.config)) != value:
            raise UnknownMaskError(f"transformers does not read its {name} ({found})")
    own = [module for module in model.modules() if type(module).__name__ in KINDS]
    before = model.config._attn_implementation
    if not own:
        yield
        return
    try:
        model.config._attn_implementation = ASKING  # for the masks; the modules do not look at it
        for module in own:
            module.forward = partial(_asked, module, model.config, note)
        yield
    finally:
        model.config._attn_implementation = before
        for module in own:
            del module.forward


def _asked(
    module: nn.Module,
    config: Any,
    note: Note,
    hidden_states: torch.Tensor,
    *_: Any,
    attention_mask: Mask | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, Mask):
        raise UnknownMaskError("its attention takes a mask that transformers does not make")
    heads = KINDS[type(module).__name__](module)
    layer: Any = getattr(module, "layer_idx", None)
    layer = module.layer_id if layer is None else layer
    note(int(layer), heads, attention_mask.seen(heads.heads, config))
    return torch.zeros_like(hidden_states), None
