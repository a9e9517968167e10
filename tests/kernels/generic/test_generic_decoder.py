from __future__ import annotations

from typing import Any

import torch
from torch import nn

from detgen.kernels.generic.generic_decoder import hooked


class Pair(nn.Module):
    """One child is called as a module, the other by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.second.forward(self.first(x)) * scale


def test_every_module_is_told_of_until_the_end() -> None:
    model = nn.Sequential()
    model.add_module("pair", Pair())
    seen: list[tuple[str, nn.Module, int, torch.Size]] = []

    def take(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append((name, module, len(args), output.shape))

    pair = model.get_submodule("pair")
    x = torch.randn(5, 3)
    plain = pair(x, scale=2.0)
    with hooked(model, take):
        assert torch.equal(pair(x, scale=2.0), plain)
    told = [
        ("pair.first", pair.get_submodule("first"), 1, (5, 4)),
        ("pair.second", pair.get_submodule("second"), 1, (5, 2)),
        ("pair", pair, 1, (5, 2)),
    ]
    assert seen == told
    assert torch.equal(pair(x, scale=2.0), plain)
    assert seen == told
