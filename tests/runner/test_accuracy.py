"""The arithmetic `detgen-2` is about as far from exact logits as transformers' own float32 is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers.engine_inputs import code
from helpers.examples import usual
from torch.overrides import TorchFunctionMode

from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.loading import load_model
from detgen.program.arrays import tensor
from detgen.runner.preparing import prepare

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
NETS = GROUPED | {
    **{"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, head_dim=64, sliding_window=50),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **GROUPED | {"num_hidden_layers": 6, "head_dim": 64, "sliding_window": 50, "num_kv_shared_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "vocab_size_per_layer_input": 4096},
        **{"hidden_size_per_layer_input": 64, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4},
    ),
    "phi": lambda: hf.PhiConfig(**SIZES),
    "gpt2": lambda: hf.GPT2Config(vocab_size=4096, n_embd=320, n_layer=4, n_head=5, n_positions=512),
    "mpt": lambda: hf.MptConfig(vocab_size=4096, d_model=320, n_layers=4, n_heads=5, max_seq_len=512),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4),
    "llama4": lambda: hf.Llama4TextConfig(
        **GROUPED | {"intermediate_size": 160, "intermediate_size_mlp": 320, "head_dim": 64, "num_local_experts": 6},
        **{"attention_chunk_size": 50, "no_rope_layers": [1, 0, 1, 1], "floor_scale": 50, "num_experts_per_tok": 1},
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **{**SIZES, "moe_intermediate_size": 96, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        **{"num_experts_per_tok": 3, "num_key_value_heads": 5, "q_lora_rank": 96, "kv_lora_rank": 64},
        **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 48},
    ),
    "qwen3-5": lambda: hf.Qwen3_5TextConfig(**NETS),
    "qwen3-next": lambda: hf.Qwen3NextConfig(
        **NETS, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=160, shared_expert_intermediate_size=96
    ),
    "lfm2": lambda: hf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv", "conv"]),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **GROUPED | {"num_local_experts": 6, "shared_intermediate_size": 160, "attention_multiplier": 0.125},
        **{
            "mamba_n_heads": 10,
            "mamba_d_state": 64,
            "mamba_n_groups": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **GROUPED | {"head_dim": 64, "mamba_num_heads": 10, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2},
        **{"n_routed_experts": 6, "moe_intermediate_size": 160, "moe_shared_expert_intermediate_size": 160},
        layers_block_type=["linear_attention", "full_attention", "moe", "mlp", "linear_attention"],
    ),
    "jamba": lambda: hf.JambaConfig(
        **GROUPED | {"attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 6, "mamba_dt_rank": 20},
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **GROUPED | {"intermediate_size": 160}, head_dim=64, sliding_window=50, num_local_experts=6
    ),
}
# Of most kinds of attention and state, few gates, of mixtures of both kinds.
USUAL = ("gemma3n", "llama4", "deepseek-v3", "qwen3-next", "granite-hybrid", "gpt-oss")


class _Exact(TorchFunctionMode):
    """Lets a forward in float64 stay there where it asks for float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        doubles = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if doubles and function is torch.Tensor.float:
            return args[0]
        if doubles and function is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **kwargs)


@pytest.mark.parametrize("family", usual(("embedded", *USUAL), FAMILIES))
def test_errors_of_logits(family: str, demo_models: Any, random_model: Callable[..., Path]) -> None:
    """Of real text by trained weights, and by random ones of several families: at most twice transformers' own."""
    folder = demo_models.target if family == "embedded" else random_model(FAMILIES[family]())
    ids = hf.AutoTokenizer.from_pretrained(folder)("".join(code(8))).input_ids[:300]
    loaded = load_model(folder, family, "float32", "none")
    prepared = prepare(loaded, None, CPU, batch_size=1, kv_memory=16 << 20)
    forward = prepared.runners[0]
    forward.cache.pages.lay_out(1, len(ids) + 1)
    own = tensor(forward.run([Window(0, 0, ids, len(ids))]))
    plain: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if family in ("mixtral", "gpt-oss", "deepseek-v3", "qwen3-next", "granite-hybrid", "jamba", "nemotron-h"):
        plain["experts_implementation"] = "eager"
    model = hf.AutoModelForCausalLM.from_pretrained(folder, **plain)
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for buffer in model.buffers():
            buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
        with _Exact():
            exact = model.double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert exact.dtype == torch.float64
    error, known = ((logits.double() - exact).square().mean().sqrt() for logits in (own, theirs))
    assert 0 < error <= 2 * known
    most, most_known = ((logits.double() - exact).abs().max() for logits in (own, theirs))
    assert most <= 2 * most_known
