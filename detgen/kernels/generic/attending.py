"""The attention of the pass in progress, which a transformers forward finds from inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from detgen.kernels.attention import AttentionTraits

# Called with layer, q, k, v and the layer's traits; see `PagedAttention.attend`.
AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, AttentionTraits], torch.Tensor]
# Not every model passes unknown keyword arguments on to its attention.
_current: ContextVar[AttendRows] = ContextVar("detgen_pass")


def attend_current(*args: Any) -> torch.Tensor:
    """Attention of the pass in progress; arguments as `AttendRows`."""
    return _current.get()(*args)


@contextmanager
def attending(attend: AttendRows) -> Iterator[None]:
    """Use this attention for the passes inside the block."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)
