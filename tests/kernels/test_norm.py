"""Root-mean-square normalisation in one kernel."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm

from detgen.kernels.norm import FusedRMSNorm
from detgen.kernels.probe import same_bits
from detgen.passes.rewriting import fuse_norms

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_equals_transformers(kind: type, epsilon: float) -> None:
    """The fused norm is transformers' norm to 1e-6, on tiny and huge rows too."""
    theirs = kind(96, eps=epsilon)
    torch.nn.init.normal_(theirs.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    ours = FusedRMSNorm(theirs.weight, epsilon)
    x = torch.randn(1, 40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 5, 40)[:, None]
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("features", [16, 64, 100, 256])
def test_row_invariant(features: int) -> None:
    """A row has the same bits in any number of rows."""
    g = torch.Generator().manual_seed(2)
    norm = FusedRMSNorm(torch.randn(features, generator=g), 1e-6)
    x = torch.randn(130, features, generator=g)
    whole = norm(x)
    for rows in range(1, 130):
        assert same_bits(norm(x[:rows]), whole[:rows])
        assert same_bits(norm(x[None, rows:]), whole[None, rows:])


def test_every_norm_of_a_model_is_replaced() -> None:
    """Two a layer and the last one in Llama, four a layer in Qwen3; the model computes what it did."""
    for model, count in ((LlamaForCausalLM(LlamaConfig(**SMALL)), 5), (Qwen3ForCausalLM(Qwen3Config(**SMALL)), 9)):
        model.eval()
        ids = torch.arange(10)[None]
        with torch.no_grad():
            before = model(ids).logits
            assert fuse_norms(model) == count
            torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)
        assert fuse_norms(model) == 0


def test_other_formulas_stay() -> None:
    """Gemma multiplies by 1 + weight, and a norm in bfloat16 rounds in between: neither is replaced."""
    assert fuse_norms(Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=16))) == 0
    assert fuse_norms(LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()) == 0
