"""Compares packed rows with the model's own forward deep in a sequence, behind windows, chunks and their like.

What stands before these rows is made up: pages of random keys and values, of which nearer ones are others than farther
ones, so that a row that sees farther than the model's own, or less far, gives something else. So a depth of thousands
of positions takes a pass of a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from detgen.kernels.input_batch import Window
from detgen.models.attaching import ATTENTION_NAME, Layout
from detgen.models.lazy_weights import widened
from detgen.models.loading import LoadedModel
from detgen.models.masks import numbers_of
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner
from detgen.runner.reference import check_logits

_ROWS = 8
_PAGES = 4  # made-up ones: for the farther half of what is before, for the farther half of the rest, and so on
_SHALLOWEST = 256 + _ROWS  # positions
_DEEPEST = 16384  # positions, even if a window or chunk is longer
_ENTRIES = 1 << 29  # of keys and values that the model's own forward handles for other numbers of the configuration


@dataclass(frozen=True, slots=True)
class Depth:
    """What a model's own forward gives deep in a sequence.

    Attributes:
        at: position of the first row.
        tokens: of the rows.
        pages: the made-up page that stands at each whole block of positions before, then the one that is cut short.
        logits: float32 [rows, vocabulary].
    """

    at: int
    tokens: list[int]
    pages: list[int]
    logits: torch.Tensor


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

    None if its sequences are too short for that, or if its own cache does not hold the keys and values that its
    attention reads, as that of multi-head latent attention: nothing can be made up then.

    Args:
        loaded: a loaded model.
        model: its decoder, whose attention is attached and whose modules are its own.
        layout: of its layers.
    """
    at = _position(model, layout, loaded.context)
    if at < PAGE:
        return None
    whole = at // PAGE
    pages = [min((whole // (whole - block)).bit_length(), _PAGES) - 1 for block in range(whole)] + [_PAGES - 1]
    tokens = torch.randint(0, loaded.vocabulary, (_ROWS,), generator=torch.Generator().manual_seed(21)).tolist()
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    made = {}
    for shape in set(layout.cached):
        entries = (torch.cat([page[n] for n in pages])[:at] for page in _entries(shape))
        made[shape] = [x.to(device).transpose(0, 1)[None] for x in entries]
    before = Cache(layers=[_Before(*made[shape]) for shape in layout.cached])
    ids, positions = torch.tensor([tokens], device=device), torch.arange(at, at + _ROWS, device=device)[None]
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
    bounds = {n for traits in layout.traits for n in (traits.window, traits.chunk) if n is not None}
    width = sum(layout.group * heads * (keys + values) for heads, keys, values in layout.cached)
    other = max((n for n in numbers_of(model.config) if n < context), default=0)
    deep = max(min(other * 3 // 2, _ENTRIES // width), *(n * 3 // 2 for n in bounds if n < context), _SHALLOWEST)
    at = min(deep, _DEEPEST, context) - _ROWS
    chunk = max((traits.chunk or 1 for traits in layout.traits), default=1)
    return at // chunk * chunk - _ROWS // 2 if 1 < chunk <= at else at  # on both sides of a chunk's end


def _entries(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of made-up pages, float32 [pages, PAGE, kv_heads, head size]; values lean one way in each."""
    heads, *sizes = shape
    maker = torch.Generator().manual_seed(22)
    keys, values = (torch.randn(_PAGES, PAGE, heads, size, generator=maker) for size in sizes)
    return keys, values + 2 * torch.randn(_PAGES, 1, heads, sizes[1], generator=maker)


def check_depth(runner: ModelRunner, depth: Depth) -> None:
    """Compare packed rows with what the model's own forward gives; clears the cache.

    Args:
        runner: the model's passes.
        depth: what its own forward gives.

    Raises:
        EngineError: if they differ by more than rounding explains.
    """
    cache = runner.cache
    *whole, cut = depth.pages
    cache.pages.lay_out_one([*whole, _PAGES, _PAGES + 1])  # what is written to is no page that stands elsewhere, too
    at = torch.arange((_PAGES + 1) * PAGE, device=runner.device)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        made = (torch.cat([x, x[cut:][:1]]) for x in _entries((values.shape[1], keys.shape[2], values.shape[3])))
        cache.write(layer, at, *(x.flatten(0, 1).to(values) for x in made))
    with runner.decoder.exactly():
        found = runner.run([Window(0, depth.at, depth.tokens, _ROWS)])
    check_logits(runner, found, depth.logits, f" at position {depth.at:,}")
