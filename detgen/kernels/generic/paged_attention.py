"""Attention in the arithmetic `detgen-2` for transformers' own forwards, whose attention layers call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.call import Call
from detgen.kernels.c.quantizing import STORAGE
from detgen.kernels.decoder import KVBuffers
from detgen.kernels.input_batch import InputBatch
from detgen.program import steps
from detgen.program.operands import Buffer, Cache, name_of
from detgen.program.program import Program

# Called with layer, q, k, v and the layer's traits; see `PagedAttention.attend`.
AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionTraits], torch.Tensor]
# A context variable, since not every model passes unknown keyword arguments on to its attention.
_current: ContextVar[AttendRows] = ContextVar("detgen_pass")


class PagedAttention:
    """Stores keys and values in place and attends over pages; one pass at a time.

    Args:
        cache: where keys and values are stored.
    """

    def __init__(self, cache: KVBuffers) -> None:
        self._cache = cache
        self._calls: dict[tuple[int, int, AttentionTraits], Call] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: InputBatch, traits: AttentionTraits
    ) -> torch.Tensor:
        """Compute the attention of a pass's rows in one layer, in float32 whatever the dtype of the arguments.

        Args:
            layer: index of the layer.
            q: [rows, heads, head_size].
            k: [rows, kv_heads, head_size].
            v: [rows, kv_heads, value head_size].
            packed: the pass.
            traits: the layer's attention traits.

        Returns:
            [rows, heads, value head_size].
        """
        rows, heads, _ = q.shape
        key = layer, heads, traits
        if key not in self._calls:
            self._calls[key] = self._steps(layer, heads, traits)
        x = torch.cat([part.reshape(rows, -1) for part in (q, k, v)], dim=1).float()
        (out,) = self._calls[key](x, of=packed.rows)
        return out.to(q.dtype).view(rows, heads, -1)

    def _steps(self, layer: int, heads: int, traits: AttentionTraits) -> Call:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        _, kv_heads, size, _ = keys.shape
        width, storage = values.shape[3], STORAGE[name_of(keys.dtype)]
        qkv = Buffer("qkv", (heads + kv_heads) * size + kv_heads * width)
        cache = Cache(heads=heads, kv_heads=kv_heads, size=size, values=width, keys=keys, kept=values, storage=storage)
        program = Program(qkv)
        program.add(steps.Rotate(name="stored", qkv=qkv, cache=cache))
        program.add(
            steps.Attend(
                name="attended",
                qkv=qkv,
                cache=cache,
                to=Buffer("attended", heads * width),
                scale=traits.scale,
                window=traits.window or 0,
                chunk=traits.chunk or 0,
                softcap=traits.softcap or 0.0,
                sinks=None if traits.sinks is None else np.array(traits.sinks, np.float32),
            )
        )
        return Call(program, (qkv,), (program.steps[-1].writes,))


def attend_current(*args: Any) -> torch.Tensor:
    """Compute attention for the pass in progress; arguments as for `AttendRows`."""
    return _current.get()(*args)


@contextmanager
def attending(attend: AttendRows) -> Iterator[None]:
    """Use `attend` for the passes inside the block."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)
