"""Forwards of other models on CUDA, on a CPU: by PyTorch's operators, and by the kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import transformers as hf
from helpers.small_models import SIZES, made
from transformers.activations import ACT2FN

from detgen.kernels.bits import same_bits
from detgen.kernels.triton.kernels import REFERENCE, TRITON, Kernels
from detgen.passes.adapter import PlainDecoder, attach
from detgen.passes.cuda_attention import CudaAttention
from detgen.passes.cuda_decoder import cuda_decoder
from detgen.passes.cuda_layers import RowLinear
from detgen.passes.cuda_modules import CudaFeedForward, CudaNorm, replace_modules
from detgen.passes.forward import Forward
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Window
from detgen.passes.pages import Pages
from detgen.passes.reference import _tokens, reference_logits
from detgen.passes.replaying import Calls

CPU = torch.device("cpu")
HEADS = {"head_dim": 32, "sliding_window": 20}
# What of a model's modules is replaced.
KINDS = ["CudaFeedForward", "CudaNorm", "RowLinear"]
FAMILIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "gemma2, softcaps and windows": (lambda: hf.Gemma2Config(**SIZES, **HEADS, query_pre_attn_scalar=32), KINDS),
    "gemma3, two rotations": (lambda: hf.Gemma3TextConfig(**SIZES, **HEADS), KINDS),
    "olmo2, norms behind": (lambda: hf.Olmo2Config(**SIZES), KINDS),
    "granite, factors": (lambda: hf.GraniteConfig(**SIZES, residual_multiplier=0.5, logits_scaling=2.0), KINDS),
    "smollm3, a layer without rotation": (
        lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0], pad_token_id=0),
        KINDS,
    ),
    "stablelm, centred norms": (lambda: hf.StableLmConfig(**SIZES), ["CudaFeedForward", "RowLinear"]),
    "gpt-neox, no gate": (
        lambda: hf.GPTNeoXConfig(**{n: s for n, s in SIZES.items() if n != "num_key_value_heads"}),
        ["RowLinear"],
    ),
    "qwen2-moe, experts": (
        lambda: hf.Qwen2MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
        ),
        KINDS,
    ),
}
PROBED = _tokens(300)
TOKENS = [(7 * i * i + 3) % 300 for i in range(40)]


def passes(model: Any, kernels: Kernels) -> Forward:
    layout = attach(model, "model")
    cache = KVCache(layout.cached, Pages(40), model.dtype, CPU)
    assert cuda_decoder(model, cache, layout.traits, kernels, Calls()) is None
    replace_modules(model, kernels)
    forward = Forward(PlainDecoder(model), cache, layout.group, CudaAttention(cache, kernels))
    cache.pages.lay_out(4, 128)
    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_the_models_own_forward(name: str, dtype: torch.dtype) -> None:
    config, kinds = FAMILIES[name]
    model = made(config(), dtype)
    want = reference_logits(model, 300, dtype)
    forward = passes(model, REFERENCE)
    made_anew = CudaFeedForward, CudaNorm, RowLinear
    replaced = {type(m).__name__ for m in forward.model.modules() if isinstance(m, made_anew)}
    assert sorted(replaced) == kinds
    found = forward.run([Window(0, 0, PROBED, len(PROBED))])
    assert (found - want).abs().max() <= (1e-4 if dtype == torch.float32 else 0.1) * want.abs().max()


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"qwen2-moe, experts"}))
def test_rows_are_right_and_alone(name: str) -> None:
    """By the kernels: a row's bits are those of passes with others, in which the sequence is read in pieces."""
    model = made(FAMILIES[name][0](), torch.float32)
    want = reference_logits(model, 300, torch.float32)
    forward = passes(model, TRITON)
    found = forward.run([Window(0, 0, PROBED, len(PROBED))])
    assert (found - want).abs().max() <= 1e-4 * want.abs().max()
    entries = forward.cache.entries(0, 0, len(PROBED))
    one, other = Window(1, 0, TOKENS[:9], 1), Window(3, 0, TOKENS[9:30], 2)
    forward.run([one, Window(2, 0, PROBED[:7], 0), other])
    again = forward.run([other, Window(2, 7, PROBED[7:], len(PROBED) - 7)])
    assert same_bits(again[2:], found[7:])
    assert all(same_bits(a, b) for a, b in zip(forward.cache.entries(2, 0, len(PROBED)), entries, strict=True))


class Gated(nn.Module):
    """A gated feed-forward; `odd` ones do something else with the same parts."""

    def __init__(self, activation: str = "silu", *, odd: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn, self.odd = ACT2FN[activation], odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner + 0.3 if self.odd else inner)


class OwnNorm(nn.Module):
    def __init__(self, added: float, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps, self.added, self.used = nn.Parameter(torch.randn(64)), 1e-5, added, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.used).to(x) * (self.added + self.weight)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (lambda: Gated(), "CudaFeedForward"),
        (lambda: Gated("gelu"), "CudaFeedForward"),
        (lambda: Gated("gelu_pytorch_tanh"), "CudaFeedForward"),
        (lambda: Gated("relu"), "Gated"),
        (lambda: Gated(odd=True), "Gated"),
        (lambda: OwnNorm(0), "CudaNorm"),
        (lambda: OwnNorm(1), "CudaNorm"),
        (lambda: OwnNorm(0, epsilon=1e-3), "OwnNorm"),
        (lambda: nn.LayerNorm(64), "LayerNorm"),
        (lambda: nn.Linear(64, 7), "RowLinear"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_what_it_computes(module: Callable[[], nn.Module], kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(module()).to(dtype).requires_grad_(False)
    x = torch.randn(1, 5, 64).to(dtype)
    own = model(x)
    replace_modules(model, REFERENCE)
    assert type(model[0]).__name__ == kind
    assert (model(x) - own).abs().max() <= (1e-4 if dtype == torch.float32 else 0.04) * own.abs().max()
