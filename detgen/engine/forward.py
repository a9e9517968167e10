"""One pass of an unchanged transformers model over a packed bag of windows.

Prefill, plain decode, verification, the fast path and the draft model all run here; they differ in the rows they
bring and in whether the pass is held to the canonical class of shapes. Knows token ids, slots and positions; knows
no requests and no files.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from detgen.engine.config import EngineError
from detgen.engine.kv_cache import KVCache
from detgen.kernels.attention import BLOCK
from detgen.kernels.cost import PassCost
from detgen.kernels.decoder_layer import AttendRows
from detgen.kernels.packing import FREE_SHAPES, Packed, Shapes, Window, pack

ATTENTION_NAME = "detgen"


class Forward:
    """Runs packed passes of one model over one KV cache.

    Args:
        model: a transformers decoder with `set_attn_implementation("detgen")` in force.
        cache: its KV cache.
        group: query heads a KV head.

    Attributes:
        passes: passes run so far.
        rows: rows of them, padding included.
        padding: rows that carried no token.
        cost: what its passes cost.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, group: int) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys[0].device
        self.cost = PassCost()
        self.passes = self.rows = self.padding = 0
        self._group = group

    def counting(self) -> Forward:
        """Passes of the same model over the same cache, counted on their own; they learn the cost together."""
        other = Forward(self.model, self.cache, self._group)
        other.cost = self.cost
        return other

    def learn_cost(self, slots: int) -> None:
        """Time passes of one row and of `slots` rows, so that costs are known before there is anything to decide.

        The cache's contents are forgotten.
        """
        slots = min(slots, self.cache.positions // BLOCK)
        self.cache.partition(BLOCK, slots)
        for timed in range(4):
            for rows in (1, slots):
                self.run([Window(slot, 0, [0], 1) for slot in range(rows)], FREE_SHAPES)
            if not timed:
                self.cost = PassCost()  # first calls set things up

    def run(self, windows: list[Window], shapes: Shapes) -> torch.Tensor:
        """Write the windows' KV entries and return the logits that they ask for.

        Args:
            windows: at most one a slot; together at most `shapes.most_rows` tokens.
            shapes: the class of shapes that the pass is held to.

        Returns:
            float32 [sum of the windows' `logits`, vocabulary], in the order of the windows.
        """
        packed = pack(windows, shapes, self.cache.stride, self.cache.scratch, self._group, self.device)
        self.passes += 1
        self.rows += packed.positions.shape[1]
        self.padding += packed.padding
        self._packed, self._shapes = packed, shapes
        started = time.perf_counter()
        token = _current.set(self.attend)
        try:
            logits = self._logits(packed)[0, : packed.count].float()
        finally:
            _current.reset(token)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.cost.update(packed.positions.shape[1], time.perf_counter() - started)
        return logits

    @torch.inference_mode()
    def _logits(self, packed: Packed) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=packed.ids,
            position_ids=packed.positions,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=packed.wanted,
        ).logits
        return logits

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Called by each attention layer: store the rows' keys and values, attend over the cache.

        Args:
            layer: index of the layer.
            q: [1, heads, rows, head_size].
            k: [1, kv_heads, rows, head_size].
            v: as k.
            scale: factor of the scores.
            window: size of the sliding window, None for full attention.
            softcap: see `attend_blocks`.

        Returns:
            [1, rows, heads, head_size].
        """
        self.cache.write(layer, self._packed.arena, k[0].transpose(0, 1), v[0].transpose(0, 1))
        heads, size = q.shape[1], q.shape[3]
        kv_heads = k.shape[1]
        group = heads // kv_heads
        outs = []
        for tile in self._packed.tiles:
            slots = tile.last - tile.first
            part = q[0] if tile.gather is None else q[0].index_select(1, tile.gather)
            part = part.reshape(kv_heads, group, slots, tile.width, size).permute(2, 0, 1, 3, 4)
            part = part.reshape(slots, kv_heads, group * tile.width, size)
            keys, values = self.cache.read(layer, tile.first, tile.last, tile.length)
            mask = tile.mask(window, group, q.dtype)
            out = self._shapes.attend(part, keys, values, mask, scale, softcap)
            out = out.view(slots, kv_heads, group, tile.width, -1).permute(0, 3, 1, 2, 4)
            outs.append(out.reshape(slots * tile.width, heads, -1))
        flat = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self._packed.back is not None:
            flat = flat.index_select(0, self._packed.back)
        return flat.unsqueeze(0)


# The pass in progress: not every model hands unknown keyword arguments down to its attention.
_current: ContextVar[AttendRows] = ContextVar("detgen_pass")
_IGNORED = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call, by its AttentionInterface."""
    unknown = [name for name, value in extra.items() if isinstance(value, torch.Tensor) and name not in _IGNORED]
    if unknown or attention_mask is not None:
        what = f"its attention takes {', '.join(unknown)}" if unknown else "it brings a mask of its own"
        raise EngineError(f"{type(module).__name__} is not supported: {what}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attend_current(layer, query, key, value, scale, sliding_window, softcap), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def attend_current(*args: Any) -> torch.Tensor:
    """Attention of the pass in progress; arguments as `AttendRows`."""
    return _current.get()(*args)


class _Recorder:
    """Takes down the shapes that the layers bring, instead of attending."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int, int]] = {}
        self.traits: dict[int, tuple[float, int | None]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self.layers[layer] = (q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        self.traits[layer] = (scale, window)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


@dataclass(frozen=True, slots=True)
class Layout:
    """What the attention layers of a model were seen to bring.

    Attributes:
        cached: (kv_heads, key head size, value head size) of each layer.
        traits: scale of the scores and sliding window (None for full attention) of each layer.
        group: query heads a KV head.
    """

    cached: list[tuple[int, int, int]]
    traits: list[tuple[float, int | None]]
    group: int


def attach(model: PreTrainedModel, name: str) -> Layout:
    """Put detgen's attention into a model and find what its layers bring.

    Args:
        model: a transformers decoder.
        name: how messages call it.

    Raises:
        EngineError: if not every layer of the model takes its attention from transformers' AttentionInterface.
    """
    kind = f"{name} ({type(model).__name__})"
    recorder = _Recorder()
    token = _current.set(recorder.attend)
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        ids = torch.zeros(1, 4, dtype=torch.int64, device=next(model.parameters()).device)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=torch.arange(4, device=ids.device)[None], use_cache=False)
    except (ValueError, TypeError, NotImplementedError) as e:
        raise EngineError(f"{kind} is not supported: {str(e).strip().splitlines()[0]}") from e
    finally:
        _current.reset(token)
    count = model.config.get_text_config().num_hidden_layers
    missing = [i for i in range(count) if i not in recorder.layers]
    if missing:
        which = "its layers do" if len(missing) == count else f"layers {missing} of {count} do"
        raise EngineError(
            f"{kind} is not supported: {which} not take attention from transformers' AttentionInterface, "
            "so detgen cannot hold it to its key-value cache"
        )
    shapes = [recorder.layers[i] for i in range(count)]
    return Layout(
        [(h, dk, dv) for _, h, dk, dv in shapes],
        [recorder.traits[i] for i in range(count)],
        min(q // h for q, h, _, _ in shapes),
    )
