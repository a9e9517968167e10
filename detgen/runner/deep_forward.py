"""Runs a model's own forward in transformers deep in a sequence, with made-up keys and values before its rows.

If nothing can be made up, it reads a text that is longer than that of the first comparison.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from detgen.models.attaching import ATTENTION_NAME, experts_by
from detgen.models.loaded import LoadedModel
from detgen.models.masks import numbers_of
from detgen.models.own_forward import Depth, Layout
from detgen.models.rotary import tuning_of
from detgen.models.widened_forward import widened
from detgen.program.arrays import array, tensor
from detgen.runner.block_manager import PAGE
from detgen.runner.depth import PAGES, ROOM, ROWS, entries

_SHALLOWEST = 256 + ROWS  # positions
_DEEPEST = 16384  # positions, whatever other numbers the configuration has
_FARTHEST = 65536  # positions, even if a window or chunk is longer
_TEXT = 128 + ROWS  # positions, if nothing is made up: two chunks of transformers' delta nets
_ENTRIES = 1 << 29  # of keys and values that the model's own forward reads for other numbers of the configuration


class _OtherEntriesError(Exception):
    """A model's cache holds something other than what its attention reads."""


class _Before(DynamicLayer):
    """The made-up keys and values of a layer, [1, kv_heads, positions, head size]; keeps nothing else."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the attention reads when a pass brings these keys and values.

        Falcon caches a KV head once per query head.
        """
        times = max(key_states.shape[1] // self.keys.shape[1], 1)
        before = [x if times == 1 else x.repeat_interleave(times, dim=1) for x in (self.keys, self.values)]
        if any(x.shape[1::2] != new.shape[1::2] for x, new in zip(before, (key_states, value_states), strict=True)):
            raise _OtherEntriesError
        return torch.cat([before[0], key_states], dim=-2), torch.cat([before[1], value_states], dim=-2)


@torch.inference_mode()
def depth_of(loaded: LoadedModel, model: PreTrainedModel, layout: Layout) -> Depth | None:
    """Run the model's own eager forward deep in a sequence.

    If layers keep states, or the model's own cache does not hold the keys and values that its attention reads, as with
    multi-head latent attention, nothing can be made up: it reads everything before the rows.

    Args:
        loaded: a loaded model.
        model: its decoder, whose attention is attached and whose modules are its own.
        layout: layout of its layers.

    Returns:
        The results; None if its sequences are too short.
    """
    at = _position(model, layout, loaded.context)
    if at < PAGE:
        return None
    if layout.states:
        return _after_text(loaded, model, layout)
    whole = at // PAGE
    pages = [min((whole // (whole - block)).bit_length(), PAGES) - 1 for block in range(whole)] + [PAGES - 1]
    tokens = _tokens(loaded, ROWS)
    made = {}
    for shape in set(layout.cached):
        before_rows = (tensor(np.concatenate([page[n] for n in pages])[:at]) for page in entries(shape))
        made[shape] = [x.to(_device(model)).transpose(0, 1)[None] for x in before_rows]
    before = Cache(layers=[_Before(*made[shape]) for shape in layout.cached])
    try:
        logits = _logits(loaded, model, at, tokens, past_key_values=before, use_cache=True)
    except _OtherEntriesError:
        return _after_text(loaded, model, layout)
    return Depth(at, tokens, pages, logits)


def _after_text(loaded: LoadedModel, model: PreTrainedModel, layout: Layout) -> Depth:
    """Do the same after a text, longer than windows and chunks as far as the smallest cache can hold it."""
    longer = max((n * 3 // 2 for n in _bounds(layout)), default=0) + ROWS
    tokens = _tokens(loaded, min(max(longer, _TEXT), ROOM * PAGE, loaded.context))
    return Depth(0, tokens, [], _logits(loaded, model, 0, tokens, use_cache=False)[-ROWS:])


def _tokens(loaded: LoadedModel, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(21).integers(0, loaded.vocabulary, count).tolist()
    return tokens


def _device(model: PreTrainedModel) -> torch.device:
    return torch.device("cpu") if model.device.type == "meta" else model.device


def _logits(
    loaded: LoadedModel, model: PreTrainedModel, at: int, tokens: list[int], **cached: Cache | bool
) -> np.ndarray:
    """Return logits of tokens from a position on, by the model's own eager forward, float32 [tokens, vocabulary]."""
    ids = torch.tensor([tokens], device=_device(model))
    positions = torch.arange(at, at + len(tokens), device=ids.device)[None]
    model.set_attn_implementation("eager")
    try:
        with widened(model, loaded.read, loaded.form), experts_by(model, "eager"):
            logits: torch.Tensor = model(input_ids=ids, position_ids=positions, **cached).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return array(logits)


def _bounds(layout: Layout) -> set[int]:
    """Return the windows and chunks of layers."""
    return {n for traits in layout.traits if traits for n in (traits.window, traits.chunk) if n is not None}


def _position(model: PreTrainedModel, layout: Layout, context: int) -> int:
    """Return the first position of the rows.

    It is half as far again as any number that may be a window or a chunk, and after the position where queries grow.
    """
    config = model.config.get_text_config()
    width = sum(layout.group * heads * (keys + values) for heads, keys, values in layout.cached)
    other = max((n for n in numbers_of(model.config) if n < context), default=0)
    known = max((n * 3 // 2 for n in _bounds(layout) if n < context), default=0)
    tunings = (found for module in model.modules() if (found := tuning_of(module, config)) is not None)
    grown = max((n for each in tunings if (n := int(each.every) - each.offset) < context), default=0) + ROWS // 2
    deep = max(min(other * 3 // 2, _ENTRIES // max(width, 1), _DEEPEST), min(max(known, grown), _FARTHEST), _SHALLOWEST)
    at = min(deep, context) - ROWS
    chunk = max((traits.chunk or 1 for traits in layout.traits if traits), default=1)
    if not 1 < chunk <= at:
        return at
    at = at // chunk * chunk - ROWS // 2  # on both sides of the end of a chunk
    return at + chunk if at + ROWS < grown and at + chunk + ROWS <= context else at
