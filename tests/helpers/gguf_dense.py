"""Models of families whose layers are alike, as llama.cpp's converter makes files of them, for tests."""

from __future__ import annotations

import math
from typing import Any

import transformers as hf

from helpers.families import LATENT, MULTIPLIED
from helpers.gguf_models import Model
from helpers.small_models import STORED

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES: dict[str, Any] = {**STORED, "num_hidden_layers": 3}
FOUR: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 16.0, "beta_slow": 0.5},
}
SCALED = {"mscale": 0.707, "mscale_all_dim": 0.707}
ROUTED: dict[str, Any] = {
    **{**SIZES, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.4, "n_group": 3, "topk_group": 2},
}


def latent(keys: int, multiplier: float | None = None) -> dict[str, Any]:
    """Settings of DeepSeek's heads, of which a file makes one; and YaRN's multiplier."""
    kept, turned = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    return {
        **{"attention.head_count_kv": 1, "attention.key_length": kept + turned, "attention.value_length": kept},
        **{"attention.key_length_mla": keys, "attention.value_length_mla": LATENT["v_head_dim"]},
        **{"rope.dimension_count": turned, "rope.scaling.yarn_log_multiplier": multiplier},
    }


LATENT_KEYS = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
PATTERN = {"attention.sliding_window_pattern": [kind == MIXED[0] for kind in MIXED]}
MODELS = {
    "granite": Model("granite", lambda: hf.GraniteConfig(**SIZES, **MULTIPLIED, attention_bias=True), in_turns=True),
    "granitemoe": Model(
        "granitemoe",
        lambda: hf.GraniteMoeConfig(**SIZES, **MULTIPLIED, num_local_experts=6, num_experts_per_tok=3),
        in_turns=True,
    ),
    "granitemoeshared": Model(
        "granitemoe",
        lambda: hf.GraniteMoeSharedConfig(
            **{**SIZES, **MULTIPLIED, "tie_word_embeddings": True, "shared_intermediate_size": 64},
            **{"num_local_experts": 6, "num_experts_per_tok": 3},
        ),
        in_turns=True,
    ),
    "smollm3": Model(
        "smollm3",
        lambda: hf.SmolLM3Config(**FOUR, mlp_bias=True, rope_parameters=YARN),
        {"rope.scaling.type": "yarn", "attention.sliding_window": None},
        in_turns=True,
    ),
    "olmo": Model("olmo", lambda: hf.OlmoConfig(**SIZES), {"attention.layer_norm_epsilon": 1e-5}, in_turns=True),
    "olmo_clamped": Model(
        "olmo",
        lambda: hf.OlmoConfig(**SIZES, clip_qkv=0.75),
        {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.75},
        in_turns=True,
    ),
    "olmo2": Model("olmo2", lambda: hf.Olmo2Config(**SIZES)),
    "olmo3": Model(
        "olmo2",
        lambda: hf.Olmo3Config(
            **{**SIZES, "sliding_window": 20, "layer_types": MIXED},
            rope_parameters={
                "full_attention": {**YARN, "attention_factor": 1.1},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {**PATTERN, "rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.1, "rope.freq_base_swa": 500.0},
    ),
    "gemma3n": Model(
        "gemma3n",
        lambda: hf.Gemma3nTextConfig(
            **FOUR
            | {"head_dim": 18, "sliding_window": 20, "num_kv_shared_layers": 1, "laurel_rank": 12}
            | {"layer_types": [*MIXED, "full_attention"], "intermediate_size": [96, 64, 96, 96]},
            **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 4096, "altup_num_inputs": 3},
            **{"altup_active_idx": 1, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0]},
            final_logit_softcapping=30.0,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {
            **{"attention.sliding_window_pattern": [True, False, True, False], "rope.freq_base_swa": 500.0},
            **{"activation_sparsity_scale": [1.6448536, 0.25334710, -math.inf, -math.inf]},
            **{"altup.active_idx": 1, "altup.num_inputs": 3, "attention.shared_kv_layers": 1},
            **{"embedding_length_per_layer_input": 14, "final_logit_softcapping": 30.0},
        },
    ),
    "glm4": Model(
        "glm4",
        lambda: hf.Glm4Config(
            **{**SIZES, "head_dim": 20, "attention_bias": True},
            rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.7},
        ),
        {"rope.dimension_count": 14},
    ),
    "glm4moe": Model(
        "glm4moe",
        lambda: hf.Glm4MoeConfig(**ROUTED, head_dim=20, use_qk_norm=True),
        {"rope.dimension_count": 10, "nextn_predict_layers": 1, "block_count": 4, "expert_gating_func": 2},
    ),
    "deepseek_v2": Model(
        "deepseek2",
        lambda: hf.DeepseekV2Config(
            **{**ROUTED, **LATENT, "topk_method": "group_limited_greedy"},
            rope_parameters=YARN | SCALED,
        ),
        {**latent(LATENT_KEYS, 0.0707), "rope.scaling.type": "yarn", "expert_gating_func": 1},
    ),
    "deepseek_v3": Model(
        "deepseek2",
        lambda: hf.DeepseekV3Config(**{**ROUTED, **LATENT, "q_lora_rank": None, "attention_bias": True}),
        {**latent(LATENT_KEYS), "expert_gating_func": 2},
    ),
    "ministral3": Model(
        "mistral3",
        lambda: hf.Ministral3Config(
            **{**SIZES, "head_dim": 18},
            rope_parameters=YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 1.0},
        in_turns=True,
    ),
    "mistral_small": Model(
        "mistral3", lambda: hf.MistralConfig(**SIZES, head_dim=18, sliding_window=None), in_turns=True
    ),
    "cohere2": Model("cohere2", lambda: hf.Cohere2Config(**FOUR, sliding_window=20, logit_scale=0.3)),
    "exaone4": Model(
        "exaone4", lambda: hf.Exaone4Config(**SIZES, head_dim=18, sliding_window=20, layer_types=MIXED), PATTERN
    ),
    "exaone4_full": Model(
        "exaone4",
        lambda: hf.Exaone4Config(
            **SIZES, head_dim=18, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
        ),
    ),
    "seed_oss": Model("seed_oss", lambda: hf.SeedOssConfig(**SIZES, head_dim=18, attention_out_bias=True)),
    "ernie4_5": Model("ernie4_5", lambda: hf.Ernie4_5Config(**SIZES, head_dim=18, use_bias=True)),
    "ernie4_5_moe": Model(
        "ernie4_5-moe",
        lambda: hf.Ernie4_5_MoeConfig(
            **{**FOUR, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "moe_layer_interval": 2},
        ),
        {"expert_shared_feed_forward_length": 48},
    ),
    "command-r": Model(
        "command-r",
        lambda: hf.CohereConfig(**SIZES, logit_scale=0.3, use_qk_norm=True),
        {"rope.scaling.type": "none"},
    ),
    "jais2": Model("jais2", lambda: hf.Jais2Config(**SIZES, head_dim=18), {"rope.dimension_count": 18}),
    "glm": Model(
        "chatglm", lambda: hf.GlmConfig(**SIZES, head_dim=20), {"rope.dimension_count": 10, "vocab_size": None}
    ),
    "qwen2vl": Model("qwen2vl", lambda: hf.Qwen2Config(**SIZES), {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": Model(
        "qwen3vl",
        lambda: hf.Qwen3Config(**SIZES, head_dim=18),
        {"rope.dimension_sections": [3, 3, 3, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": Model(
        "qwen3vlmoe",
        lambda: hf.Qwen3MoeConfig(
            **{**SIZES, "head_dim": 18, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            norm_topk_prob=True,
        ),
        {"rope.dimension_sections": [3, 3, 3, 0], "n_deepstack_layers": 3, "expert_weights_norm": None},
    ),
    "solar_open": Model(
        "glm4moe",
        lambda: hf.SolarOpenConfig(**ROUTED | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}, head_dim=18),
        {"rope.dimension_count": 18, "expert_gating_func": 2},
    ),
    "mistral4": Model(
        "mistral4",
        lambda: hf.Mistral4Config(
            **{**ROUTED, **LATENT},
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        ),
        {**latent(LATENT_KEYS, 0.1), "rope.scaling.type": "yarn", "attention.temperature_scale": None},
        fused=True,
    ),
    "minimax_m2": Model(
        "minimax-m2",
        lambda: hf.MiniMaxM2Config(
            **{**SIZES, "head_dim": 20, "num_local_experts": 6, "num_experts_per_tok": 3},
            rope_parameters={"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        ),
        {"rope.dimension_count": 10, "expert_feed_forward_length": 96, "expert_gating_func": 2},
    ),
    "afmoe": Model(
        "afmoe",
        lambda: hf.AfmoeConfig(
            **{**FOUR, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 32, "num_dense_layers": 1, "sliding_window": 20, "route_scale": 2.4},
            mup_enabled=True,
        ),
        {"rope.dimension_count": 18, "expert_weights_norm": True},
    ),
    "exaone_moe": Model(
        "exaone-moe",
        lambda: hf.ExaoneMoeConfig(
            **{**ROUTED, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "norm_topk_prob": True},
            **{"sliding_window": 20, "layer_types": MIXED},
        ),
        {
            **{**PATTERN, "expert_gating_func": 2, "expert_shared_feed_forward_length": 64},
            **{"nextn_predict_layers": 0, "rope.scaling.type": "none", "expert_shared_count": 2},
        },
    ),
    "hy_v3": Model(
        "hy_v3",
        lambda: hf.HYV3Config(
            **{**FOUR, "head_dim": 18, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"num_shared_experts": 2, "router_scaling_factor": 2.5},
        ),
        {
            **{"expert_shared_feed_forward_length": 64, "expert_weights_norm": True, "expert_gating_func": 2},
            **{"expert_shared_count": None, "nextn_predict_layers": 1, "block_count": 5},
        },
        tables="dots1",
    ),
    "mellum": Model(
        "mellum",
        lambda: hf.MellumConfig(
            **{**SIZES, "head_dim": 18, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"sliding_window": 20, "layer_types": MIXED},
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        {**PATTERN, "rope.scaling.type": "yarn", "rope.freq_base_swa": 500.0, "expert_weights_norm": None},
        tables="qwen3moe",
    ),
    "cohere2_moe": Model(
        "cohere2moe",
        lambda: hf.Cohere2MoeConfig(
            **{**SIZES, "head_dim": 18, "sliding_window": 20, "layer_types": MIXED, "logit_scale": 0.3},
            **{"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "norm_topk_prob": False},
            **{"expert_selection_fn": "sigmoid", "prefix_dense_intermediate_size": 72},
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        {
            **{**PATTERN, "expert_gating_func": 2, "feed_forward_length": 72, "expert_feed_forward_length": 96},
            **{"expert_shared_feed_forward_length": 192, "leading_dense_block_count": 1, "rope.scaling.type": "none"},
        },
        tables="deepseek2",
    ),
    "arcee": Model("arcee", lambda: hf.ArceeConfig(**SIZES, head_dim=18, mlp_bias=True), in_turns=True),
    "dots1": Model(
        "dots1",
        lambda: hf.Dots1Config(**ROUTED, head_dim=18, norm_topk_prob=True),
        {"attention.sliding_window": None},
    ),
    "hunyuan": Model(
        "hunyuan-dense",
        lambda: hf.HunYuanDenseV1Config(
            **{**SIZES, "head_dim": 18},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        ),
        {"rope.freq_base": 1e4 * 50 ** (18 / 16), "rope.scaling.type": "none"},
    ),
    "hunyuan_moe": Model(
        "hunyuan-moe",
        lambda: hf.HunYuanMoEV1Config(**SIZES, head_dim=18, num_experts=6, moe_topk=3),
        {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96, "expert_shared_count": 1},
    ),
    "llama4": Model(
        "llama4",
        lambda: hf.Llama4TextConfig(
            **{**FOUR, "head_dim": 18, "intermediate_size_mlp": 64, "num_local_experts": 6, "num_experts_per_tok": 2},
            interleave_moe_layer_step=2,
        ),
        {"feed_forward_length": 64, "expert_feed_forward_length": SIZES["intermediate_size"]},
    ),
    "olmoe": Model(
        "olmoe", lambda: hf.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3), {"expert_weights_norm": None}
    ),
}
