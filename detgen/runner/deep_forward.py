"""Runs a model's own forward in transformers deep in a sequence, with made-up keys and values before its rows."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from detgen.models.attaching import ATTENTION_NAME
from detgen.models.lazy_weights import widened
from detgen.models.loading import LoadedModel
from detgen.models.masks import numbers_of
from detgen.models.own_forward import Depth, Layout
from detgen.runner.block_manager import PAGE
from detgen.runner.depth import PAGES, ROWS, entries

_SHALLOWEST = 256 + ROWS  # positions
_DEEPEST = 16384  # positions, even if a window or chunk is longer
_ENTRIES = 1 << 29  # of keys and values that the model's own forward handles for other numbers of the configuration


class _OtherEntriesError(Exception):
    """A model's cache holds something else than what its attention reads."""


class _Before(DynamicLayer):
    """The made-up keys and values of a layer, [1, kv_heads, positions, head size]; keeps nothing else."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention reads, when a pass brings these keys and values."""
        if key_states.shape[1::2] != self.keys.shape[1::2] or value_states.shape[1::2] != self.values.shape[1::2]:
            raise _OtherEntriesError
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


@torch.inference_mode()
def depth_of(loaded: LoadedModel, model: PreTrainedModel, layout: Layout) -> Depth | None:
    """Run the model's own eager forward deep in a sequence.

    None if its sequences are too short for that, if layers keep states, or if its own cache does not hold the keys and
    values that its attention reads, as that of multi-head latent attention: nothing can be made up then.

    Args:
        loaded: a loaded model.
        model: its decoder, whose attention is attached and whose modules are its own.
        layout: of its layers.
    """
    at = 0 if layout.states else _position(model, layout, loaded.context)
    if at < PAGE:
        return None
    whole = at // PAGE
    pages = [min((whole // (whole - block)).bit_length(), PAGES) - 1 for block in range(whole)] + [PAGES - 1]
    tokens = torch.randint(0, loaded.vocabulary, (ROWS,), generator=torch.Generator().manual_seed(21)).tolist()
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    made = {}
    for shape in set(layout.cached):
        before_rows = (torch.cat([page[n] for n in pages])[:at] for page in entries(shape))
        made[shape] = [x.to(device).transpose(0, 1)[None] for x in before_rows]
    before = Cache(layers=[_Before(*made[shape]) for shape in layout.cached])
    ids, positions = torch.tensor([tokens], device=device), torch.arange(at, at + ROWS, device=device)[None]
    model.set_attn_implementation("eager")
    try:
        with widened(model, loaded.read, loaded.form):
            out = model(input_ids=ids, position_ids=positions, past_key_values=before, use_cache=True)
    except _OtherEntriesError:
        return None
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return Depth(at, tokens, pages, out.logits[0].float())


def _position(model: PreTrainedModel, layout: Layout, context: int) -> int:
    """The first of the rows' positions: half as far again as any number that may be a window or a chunk."""
    bounds = {n for traits in layout.traits if traits for n in (traits.window, traits.chunk) if n is not None}
    width = sum(layout.group * heads * (keys + values) for heads, keys, values in layout.cached)
    other = max((n for n in numbers_of(model.config) if n < context), default=0)
    deep = max(min(other * 3 // 2, _ENTRIES // width), *(n * 3 // 2 for n in bounds if n < context), _SHALLOWEST)
    at = min(deep, _DEEPEST, context) - ROWS
    chunk = max((traits.chunk or 1 for traits in layout.traits if traits), default=1)
    return at // chunk * chunk - ROWS // 2 if 1 < chunk <= at else at  # on both sides of a chunk's end
