"""Modules are replaced where their replacement gives what they give, and left alone where it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from detgen.models.replacing import replace_modules


class FeedForward(nn.Module):
    """Gated, unless it is told otherwise; `odd` ones do something else with the same parts."""

    def __init__(self, *, gated: bool = True, odd: bool = False, act: str = "silu") -> None:
        super().__init__()
        self.gated, self.odd = gated, odd
        if gated:
            self.gate_proj = nn.Linear(12, 20)
        self.up_proj, self.down_proj, self.act_fn = nn.Linear(12, 20), nn.Linear(20, 12), ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x) if self.gated else self.act_fn(self.up_proj(x))
        return self.down_proj(inner + 0.01 if self.odd else inner)


class Clamped(FeedForward):
    """A gated feed-forward like those of models with a `swiglu_limit`."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class OwnNorm(nn.Module):
    def __init__(self, added: float, *, odd: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.added, self.odd = nn.Parameter(torch.randn(12)), 1e-5, added, odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (1e-3 if self.odd else self.eps))
        return x * scale * (self.added + self.weight)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: FeedForward(), "NativeFeedForward"),
        (lambda: FeedForward(gated=False), "NativeFeedForward"),
        (lambda: OwnNorm(0), "NativeNorm"),
        (lambda: OwnNorm(1), "NativeNorm"),
        (lambda: nn.LayerNorm(12), "NativeNorm"),
        (lambda: nn.Linear(12, 7), "NativeLinear"),
        (lambda: nn.GELU(), "NativeActivation"),
        (lambda: nn.Sigmoid(), "NativeActivation"),
        (lambda: Clamped(None), "NativeFeedForward"),
        (lambda: Clamped(7.0), "Clamped"),
        (lambda: OwnNorm(0, odd=True), "OwnNorm"),
        (lambda: FeedForward(odd=True), "FeedForward"),
        (lambda: FeedForward(act="tanh"), "FeedForward"),
        (lambda: nn.Softplus(), "Softplus"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_what_it_computes(made: Any, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(made()).to(dtype).requires_grad_(False)
    x, own = torch.randn(1, 5, 12), copy.deepcopy(model).float()
    replace_modules(model)
    assert type(model[0]).__name__ == kind
    assert (model(x) - own(x)).abs().max() <= 1e-4 * own(x).abs().max()


def test_modules_of_one_class_may_differ() -> None:
    """Where one layer clamps and another does not, each is compared by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(Clamped(None), Clamped(7.0), Clamped(None)).requires_grad_(False)
    replace_modules(model)
    assert [type(m).__name__ for m in model] == ["NativeFeedForward", "Clamped", "NativeFeedForward"]


def test_parts_of_what_stays_are_replaced() -> None:
    model = nn.Sequential(FeedForward(odd=True)).requires_grad_(False)
    replace_modules(model)
    kinds = [type(m).__name__ for m in model[0].children()]
    assert kinds == ["NativeLinear", "NativeLinear", "NativeLinear", "NativeActivation"]


class Router(nn.Module):
    """Takes the weight of a layer that it does not call, and the number format of one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(self.norm(x.to(self.norm.weight.dtype))), self.last.weight)


def test_what_others_reach_into() -> None:
    """What is kept stays as it is; what is replaced still tells its number format."""
    model = nn.Sequential(Router()).requires_grad_(False)
    x = torch.randn(1, 5, 12)
    own = model(x)
    replace_modules(model, {"0.last"})
    assert [type(m).__name__ for m in model[0].children()] == ["NativeNorm", "NativeLinear", "Linear"]
    assert (model(x) - own).abs().max() <= 1e-4 * own.abs().max()
