"""One pass of a model over a packed bag of windows.

Prefill, plain decode, verification, the fast path and the draft model all run here; they differ in the rows they
bring and in whether the pass is held to the canonical class of shapes. Knows token ids, slots and positions; knows
no requests and no files.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from detgen.kernels.attention import BLOCK, AttentionTraits
from detgen.passes.adapter import PlainDecoder, attending
from detgen.passes.cost import PassCost
from detgen.passes.kv_cache import KVCache
from detgen.passes.lean_decoder import LeanDecoder
from detgen.passes.packing import FREE_SHAPES, Packed, Shapes, Window, pack


class Forward:
    """Runs packed passes of one model over one KV cache.

    Args:
        model: a decoder that takes its attention from the pass.
        cache: its KV cache.
        group: query heads a KV head.

    Attributes:
        passes: passes run so far.
        rows: rows of them, padding included.
        padding: rows that carried no token.
        cost: what its passes cost, and the choices that follow them.
    """

    def __init__(self, model: PlainDecoder | LeanDecoder, cache: KVCache, group: int) -> None:
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
        started = time.perf_counter()
        packed = pack(windows, shapes, self.cache.slot_size, self.cache.scratch, self._group, self.device)
        rows = len(packed.ids)
        self.passes += 1
        self.rows += rows
        self.padding += packed.padding
        with torch.inference_mode(), attending(partial(self.attend, packed, shapes)):
            logits: torch.Tensor = self.model(packed.ids, packed.positions, packed.wanted)[: packed.count].float()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.cost.update(rows, time.perf_counter() - started, packed.tiles.area)
        return logits

    def attend(
        self,
        packed: Packed,
        shapes: Shapes,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        traits: AttentionTraits,
    ) -> torch.Tensor:
        """Called by each attention layer: store the rows' keys and values, attend over the cache.

        Args:
            packed: the pass.
            shapes: what it is held to.
            layer: index of the layer.
            q: [rows, heads, head_size].
            k: [rows, kv_heads, head_size].
            v: as k; its head size may be another.
            traits: the layer's.

        Returns:
            [rows, heads, value head_size].
        """
        self.cache.write(layer, packed.kv_positions, k, v)
        return packed.tiles.attend(q, k.shape[1], partial(self.cache.read, layer), shapes.attend, traits)
