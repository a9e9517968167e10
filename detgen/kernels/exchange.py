"""What goes through a pass of a model that thinks besides tokens: states in, hidden states out.

Thinking States (Amos et al., arXiv 2602.08332, section 3) add a state to the input of one layer, and read the input of
another. Nothing here knows about chunks or thoughts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(slots=True)
class Exchange:
    """States for the rows of one pass, and the rows' hidden states.

    Attributes:
        inject: the layer to whose input `states` are added.
        extract: the layer whose input is kept, after the addition if it is the same layer; -1 for none.
        states: float32 [rows, hidden].
        hidden: float32 [rows, hidden], set by the pass.
    """

    inject: int
    extract: int
    states: torch.Tensor
    hidden: torch.Tensor | None = None

    def at(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a layer reads, [rows, hidden], in the place of `hidden`."""
        if layer == self.inject:
            hidden = hidden + self.states.to(hidden.dtype)
        if layer == self.extract:
            self.hidden = hidden.float()
        return hidden


@contextmanager
def exchanging(layers: Sequence[nn.Module], exchange: Exchange) -> Iterator[None]:
    """Inside the block, apply the exchange to the inputs of transformers' decoder layers, for one pass."""
    with ExitStack() as hooks:
        for i in {exchange.inject, exchange.extract} - {-1}:
            hook = layers[i].register_forward_pre_hook(partial(_change, exchange, i), with_kwargs=True)
            hooks.callback(hook.remove)
        yield


def _change(exchange: Exchange, layer: int, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Replace the hidden states, [1, rows, hidden], among the arguments of a layer."""
    if args:
        return (exchange.at(layer, args[0][0])[None], *args[1:]), named
    return args, {**named, "hidden_states": exchange.at(layer, named["hidden_states"][0])[None]}
