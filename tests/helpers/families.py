"""Configurations of small models by family: those that run whole in one call, those that keep their own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

WINDOW = 40  # of models with sliding windows: shorter than most prompts below
COMMON: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON: dict[str, Any] = {**COMMON, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 0}
LLAMA4: dict[str, Any] = {  # with chunks and positions from which queries grow, both shorter than most prompts
    **LLAMA,
    **{"head_dim": 18, "intermediate_size_mlp": 80, "num_local_experts": 5, "moe_layers": [1, 2]},
    **{"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1], "floor_scale": 24, "attn_scale": 0.4},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ROUTED: dict[str, Any] = {
    **LLAMA,
    **{"num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
}
LATENT: dict[str, Any] = {  # of attention; no size is a multiple of another
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 36},
    **{"qk_rope_head_dim": 10, "qk_nope_head_dim": 14, "v_head_dim": 18},
}
NETS: dict[str, Any] = {  # of gated delta nets
    **LLAMA,
    **{"head_dim": 18, "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 20, "num_hidden_layers": 4},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
CONVOLVED: dict[str, Any] = {  # LFM2's short convolutions, in the last layer too
    **LLAMA,
    **{"conv_L_cache": 4, "conv_bias": True, "layer_types": ["conv", "full_attention", "conv"]},
}
SPACES: dict[str, Any] = {  # of Mamba-2 mixers; in the last layer too
    **LLAMA,
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3},
    **{"mamba_chunk_size": 16, "num_hidden_layers": 3},
}
SCANNED: dict[str, Any] = {  # of the first Mamba
    **{"vocab_size": 320, "hidden_size": 44, "num_hidden_layers": 2, "state_size": 12, "conv_kernel": 3},
    **{"expand": 2, "time_step_rank": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0},
}
MULTIPLIED: dict[str, Any] = {  # Granite's
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
}
NEMOTRON_H: dict[str, Any] = {
    **LLAMA,
    **{"head_dim": 18, "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 12, "n_groups": 3},
    **{"conv_kernel": 4, "chunk_size": 16, "time_step_min": 1e-9, "n_routed_experts": 6, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5},
}
TOWER: dict[str, Any] = {  # of multimodal models
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}

DESCRIBED: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**LLAMA),
    "qwen2": lambda: hf.Qwen2Config(**LLAMA),
    "qwen3": lambda: hf.Qwen3Config(**LLAMA, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **LLAMA,
        head_dim=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **LLAMA,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: hf.Phi3Config(**LLAMA),
    "longrope": lambda: hf.Phi3Config(
        **{**LLAMA, "max_position_embeddings": 1024},
        original_max_position_embeddings=512,
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4},
            **{"short_factor": [1.1] * 8, "long_factor": [2.0] * 8},
        },
    ),
    "dynamic": lambda: hf.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(
        **COMMON, intermediate_size=96, max_position_embeddings=512, bos_token_id=0, eos_token_id=0
    ),
    "opt": lambda: hf.OPTConfig(
        **COMMON, ffn_dim=96, max_position_embeddings=512, word_embed_proj_dim=64, eos_token_id=0, pad_token_id=1
    ),
    "gpt2": lambda: hf.GPT2Config(**GPT2),
    "gptj": lambda: hf.GPTJConfig(**GPT2, rotary_dim=10),
    "codegen": lambda: hf.CodeGenConfig(**{**GPT2, "n_head": 8}, rotary_dim=6, pad_token_id=0),
    "falcon": lambda: hf.FalconConfig(**FALCON),
    "falcon_11b": lambda: hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_serial": lambda: hf.FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "bloom": lambda: hf.BloomConfig(vocab_size=320, hidden_size=96, n_layer=3, n_head=6, eos_token_id=0),
    "mpt": lambda: hf.MptConfig(
        vocab_size=320, d_model=96, n_layers=3, n_heads=6, max_seq_len=512, bos_token_id=1, eos_token_id=0
    ),
    "mpt_clamped": lambda: hf.MptConfig(
        **{"vocab_size": 320, "d_model": 96, "n_layers": 3, "n_heads": 6, "bos_token_id": 1, "eos_token_id": 0},
        **{"max_seq_len": 512, "attn_config": {"clip_qkv": 0.8}},
    ),
    "olmo2": lambda: hf.Olmo2Config(**LLAMA),
    "mixtral": lambda: hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **LLAMA,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[1],
        sliding_window=WINDOW,
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **LLAMA, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **NETS, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**NETS),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config=hf.Qwen3_5TextConfig(**NETS), vision_config={**TOWER, "depth": 2, "out_hidden_size": 64}
    ),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **{name: value for name, value in NETS.items() if name != "intermediate_size"},
        **{"num_experts": 5, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56},
    ),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **{**CONVOLVED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        **{"num_dense_layers": 1, "routed_scaling_factor": 2.5},
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **{**SPACES, **MULTIPLIED, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 56},
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **NEMOTRON_H, layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"]
    ),
    "jamba": lambda: hf.JambaConfig(
        **{**LLAMA, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5},
        **{"num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 12, "mamba_d_conv": 3, "mamba_dt_rank": 10},
    ),
    "falcon_h1": lambda: hf.FalconH1Config(
        **{**SPACES, "mamba_d_ssm": 128, "mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True},
        **{"embedding_multiplier": 5.5, "lm_head_multiplier": 0.3, "mlp_multipliers": [0.8, 0.4]},
        **{"key_multiplier": 0.4, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2},
        **{"ssm_multipliers": [0.7, 0.5, 0.4, 0.6, 0.9], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.3},
    ),
    "gemma3n_text": lambda: hf.Gemma3nTextConfig(  # streams of which layers read the second, few gates that stay
        **{**LLAMA, "num_hidden_layers": 5, "head_dim": 18, "sliding_window": WINDOW, "num_kv_shared_layers": 2}
        | {"layer_types": [*MIXED[:2], *MIXED], "intermediate_size": [96, 80, 96, 96, 72], "laurel_rank": 12},
        **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 300, "altup_num_inputs": 3},
        **{"altup_active_idx": 1, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.3]},
    ),
    "gemma4_text": lambda: hf.Gemma4TextConfig(  # layers that see the keys of others, and read more of each token
        **{**LLAMA, "num_hidden_layers": 5, "head_dim": 20, "global_head_dim": 26, "sliding_window": WINDOW},
        **{"layer_types": [*MIXED[:2], *MIXED[:2], "full_attention"], "num_kv_shared_layers": 3},
        **{"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 320, "use_double_wide_mlp": True},
        final_logit_softcapping=30.0,
    ),
    "gemma4_experts": lambda: hf.Gemma4TextConfig(  # beside feed-forwards; values that are keys
        **{**LLAMA, "head_dim": 18, "global_head_dim": 26, "sliding_window": WINDOW, "num_hidden_layers": 4},
        **{"layer_types": [*MIXED, "full_attention"], "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 40},
        hidden_size_per_layer_input=0,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**LLAMA, "head_dim": 18, "sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 3},
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 64},
        },
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=hf.MistralConfig(**LLAMA, head_dim=18, sliding_window=WINDOW),
        vision_config=hf.PixtralVisionConfig(**TOWER),
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=LLAMA
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        vision_config={**TOWER, "depth": 2, "out_hidden_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]},
        eos_token_id=0,
    ),
    "ministral": lambda: hf.MinistralConfig(**LLAMA, head_dim=18, sliding_window=WINDOW),
    "ministral3": lambda: hf.Ministral3Config(
        **LLAMA,
        head_dim=18,
        sliding_window=None,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "llama4": lambda: hf.Llama4TextConfig(**LLAMA4, num_experts_per_tok=1),
    "llama4_2": lambda: hf.Llama4TextConfig(
        **{**LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False}, num_experts_per_tok=2
    ),
    "hunyuan": lambda: hf.HunYuanDenseV1Config(
        **LLAMA, head_dim=18, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    ),
    "hunyuan_moe": lambda: hf.HunYuanMoEV1Config(**LLAMA, head_dim=18, num_experts=6, moe_topk=3),
    "olmo3": lambda: hf.Olmo3Config(**LLAMA, sliding_window=WINDOW, layer_types=MIXED),
    "cohere2": lambda: hf.Cohere2Config(**LLAMA, head_dim=18, sliding_window=WINDOW, layer_types=MIXED),
    "exaone4": lambda: hf.Exaone4Config(**LLAMA, head_dim=18, sliding_window=WINDOW, layer_types=MIXED),
    "ernie4_5": lambda: hf.Ernie4_5Config(**LLAMA, head_dim=18, use_bias=True),
    "helium": lambda: hf.HeliumConfig(**LLAMA, head_dim=16),
    "glm": lambda: hf.GlmConfig(**LLAMA, head_dim=16),
    "glm4": lambda: hf.Glm4Config(**LLAMA, head_dim=16),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**ROUTED, "head_dim": 16, "use_qk_norm": True, "n_routed_experts": 6, "n_shared_experts": 2}
    ),
    "dots1": lambda: hf.Dots1Config(
        **{**ROUTED, "head_dim": 18, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1},
        **{"norm_topk_prob": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **{**ROUTED, **LATENT, "v_head_dim": 20, "n_routed_experts": 6, "n_shared_experts": 1, "q_lora_rank": None},
        **{"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**ROUTED, **LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
        **{"rope_interleave": True, "norm_topk_prob": True},
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **{**ROUTED, **LATENT, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "smollm3": lambda: hf.SmolLM3Config(**LLAMA, no_rope_layers=[1, 0, 1]),
    "granite": lambda: hf.GraniteConfig(
        **LLAMA, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=8.0
    ),
    "phi": lambda: hf.PhiConfig(**LLAMA),
    "stablelm": lambda: hf.StableLmConfig(**LLAMA, use_parallel_residual=True, use_qkv_bias=True),
    "cohere": lambda: hf.CohereConfig(**LLAMA, use_qk_norm=True),
    "starcoder2": lambda: hf.Starcoder2Config(**{**LLAMA, "intermediate_size": 97}, sliding_window=WINDOW),
    "apertus": lambda: hf.ApertusConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "nanochat": lambda: hf.NanoChatConfig(**LLAMA, final_logit_softcapping=2.0),
    "modernbert_decoder": lambda: hf.ModernBertDecoderConfig(
        **{**COMMON, "intermediate_size": 96, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 0},
        **{"local_attention": WINDOW, "layer_types": MIXED, "mlp_bias": True},
    ),
}

# Of these, families that together have all kinds of steps, and all that steps can be told.
USUAL_FAMILIES = (
    *("llama", "qwen3_next", "gemma3n_text", "nemotron_h", "opt", "llama4", "gpt_oss", "gemma4_experts", "dots1"),
    *("mpt_clamped", "lfm2_moe", "gemma2", "granitemoehybrid", "deepseek_v3", "qwen2_5_vl", "falcon_h1", "jamba"),
    *("apertus", "nanochat"),
)

# Families of one row, which take nothing that those above do not take.
ROWS: dict[str, Callable[[], Any]] = {
    "gemma": lambda: hf.GemmaConfig(**LLAMA, head_dim=18),
    "seed_oss": lambda: hf.SeedOssConfig(**LLAMA, head_dim=18, attention_out_bias=True),
    "cwm": lambda: hf.CwmConfig(
        **LLAMA,
        head_dim=18,
        sliding_window=WINDOW,
        layer_types=MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "olmo": lambda: hf.OlmoConfig(**LLAMA),
    "olmo_clamped": lambda: hf.OlmoConfig(**LLAMA, clip_qkv=0.9),
    "olmoe": lambda: hf.OlmoeConfig(**LLAMA, num_experts=6, num_experts_per_tok=3),
    "olmoe_clamped": lambda: hf.OlmoeConfig(**LLAMA, num_experts=6, num_experts_per_tok=3, clip_qkv=0.6),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **{**LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
        **{"logits_scaling": 8.0, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(
        **{**ROUTED, "head_dim": 18, "num_experts": 6, "n_group": 3, "topk_group": 2, "num_shared_experts": 2},
        **{"sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "solar_open": lambda: hf.SolarOpenConfig(
        **{**ROUTED, "head_dim": 18, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 0}
    ),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**LLAMA, head_dim=18, num_local_experts=6, num_experts_per_tok=3),
    "hy_v3": lambda: hf.HYV3Config(
        **{**ROUTED, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "router_scaling_factor": 2.5}
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **{**LLAMA, **LATENT, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    ),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(
        **{**LLAMA, "use_post_norm": True, "embedding_multiplier": 10.0, "residual_multiplier": 0.3},
        **{"attention_multiplier": 0.1, "logits_scaling": 0.2},
    ),
    "gemma3n_two": lambda: hf.Gemma3nTextConfig(  # streams, each layer with keys of its own
        **{**LLAMA, "hidden_size": 90, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 34}
        | {"intermediate_size": [130, 64, 33], "layer_types": MIXED, "num_kv_shared_layers": 0, "sliding_window": 33},
        **{"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 7, "laurel_rank": 5},
        **{"altup_num_inputs": 2, "altup_correct_scale": False, "activation_sparsity_pattern": [0.0, 0.8, 0.05]},
    ),
    "vaultgemma": lambda: hf.VaultGemmaConfig(
        **{**LLAMA, "head_dim": 18, "sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 20}
    ),
    "phimoe": lambda: hf.PhimoeConfig(  # of sparse mixing
        **LLAMA,
        **{"num_local_experts": 5, "router_jitter_noise": 0.4, "attention_bias": True, "lm_head_bias": True},
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256},
            **{"short_factor": [1.1] * 4 + [1.5] * 4, "long_factor": [4.0] * 8},
            **{"short_mscale": 1.2, "long_mscale": 1.3},
        },
    ),
    "cohere2_moe": lambda: hf.Cohere2MoeConfig(
        **{**LLAMA, "head_dim": 18, "sliding_window": WINDOW, "layer_types": ["full_attention", *MIXED[:2]]},
        **{"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "logit_scale": 0.3},
        **{"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "prefix_dense_intermediate_size": 72},
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "arcee": lambda: hf.ArceeConfig(**LLAMA, head_dim=18, mlp_bias=True),
    "jais2": lambda: hf.Jais2Config(**LLAMA, head_dim=18),
    "nemotron": lambda: hf.NemotronConfig(**LLAMA, head_dim=20),
    "persimmon": lambda: hf.PersimmonConfig(**LLAMA),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**GPT2, n_inner=97),
    "mellum": lambda: hf.MellumConfig(
        **{**ROUTED, "head_dim": 18, "num_local_experts": 6, "sliding_window": WINDOW, "layer_types": MIXED},
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "flint": lambda: hf.FlintConfig(
        **{**ROUTED, "head_dim": 18, "num_experts": 6, "sliding_window": WINDOW, "layer_types": MIXED},
        shared_expert_intermediate_size=56,
    ),
    "flex_olmo": lambda: hf.FlexOlmoConfig(**LLAMA, num_experts=6, num_experts_per_tok=3),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **{**ROUTED, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
    ),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **{**LLAMA, **MULTIPLIED, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 56}
    ),
    "lfm2": lambda: hf.Lfm2Config(**CONVOLVED),
    "lfm3": lambda: hf.Lfm3Config(  # with norms on both sides, and a gate of each head
        **CONVOLVED
        | {"head_dim": 20, "sliding_window": WINDOW, "num_hidden_layers": 4}
        | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}
    ),
    "lfm3_plain": lambda: hf.Lfm3Config(  # without them, an attention last
        **CONVOLVED
        | {"conv_bias": False, "head_dim": 16, "sliding_window": WINDOW, "use_attention_gate": False}
        | {"layer_types": ["sliding_attention", "conv", "full_attention"], "use_sandwich_norm": False}
    ),
    "granite4": lambda: hf.GraniteMoeHybridConfig(
        **{**SPACES, **MULTIPLIED, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56},
    ),
    "falcon_h1_norms": lambda: hf.FalconH1Config(
        **{**SPACES, "mamba_d_ssm": 128, "mamba_rms_norm": False, "mamba_proj_bias": True, "attention_bias": True}
    ),
    "bamba": lambda: hf.BambaConfig(**SPACES, attn_layer_indices=[1]),
    "mamba": lambda: hf.MambaConfig(**SCANNED, use_conv_bias=False, use_bias=True),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**SCANNED, tie_word_embeddings=False),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(**NETS),
    "olmo_hybrid_turned": lambda: hf.OlmoHybridConfig(
        **NETS,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "exaone4_full": lambda: hf.Exaone4Config(  # all layers rotate
        **{**LLAMA, "head_dim": 18, "sliding_window": None, "sliding_window_pattern": None},
        layer_types=["full_attention"] * 3,
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **{"vocab_size": 320, "hidden_size": 64, "num_layers": 4, "num_heads": 8, "max_position_embeddings": 512},
        **{"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "mistral4": lambda: hf.Mistral4Config(
        **{**ROUTED, **LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "afmoe": lambda: hf.AfmoeConfig(
        **{**ROUTED, "head_dim": 18, "num_experts": 6, "num_shared_experts": 2, "num_dense_layers": 1},
        **{"sliding_window": WINDOW, "layer_types": MIXED, "route_scale": 2.5, "mup_enabled": True},
    ),
    "granite_swa": lambda: hf.GraniteSWAConfig(**LLAMA, **MULTIPLIED, sliding_window=WINDOW, layer_types=MIXED),
    "granitemoe_swa": lambda: hf.GraniteMoeSWAConfig(
        **{**LLAMA, **MULTIPLIED, "sliding_window": WINDOW, "layer_types": MIXED},
        **{"num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "aria_text": lambda: hf.AriaTextConfig(**LLAMA, moe_num_experts=6, moe_topk=3, moe_num_shared_experts=2),
    "phi_norms": lambda: hf.PhiConfig(**LLAMA, qk_layernorm=True),
    "stablelm_norms": lambda: hf.StableLmConfig(**LLAMA, qk_layernorm=True),
    "nemotron_h_short": lambda: hf.NemotronHConfig(  # experts that read short vectors
        **{**NEMOTRON_H, "moe_latent_size": 36, "mlp_bias": True},
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "gpt_neox_20b": lambda: hf.GPTNeoXConfig(
        **{**COMMON, "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0},
        hidden_act="gelu_fast",
    ),
    "bloom_normed": lambda: hf.BloomConfig(  # layers add to what is normed
        **{"vocab_size": 320, "hidden_size": 96, "n_layer": 3, "n_head": 6, "eos_token_id": 0},
        apply_residual_connection_post_layernorm=True,
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=320,
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2},
        **{"conv_kernel": 3, "chunk_size": 16, "use_bias": True, "pad_token_id": 0, "eos_token_id": 0},
    ),
}

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
OWN_FORWARD: dict[str, Callable[[], Any]] = {
    "gemma": lambda: hf.GemmaConfig(**SMALL, head_dim=12, hidden_act="quick_gelu"),
    "olmo": lambda: hf.OlmoConfig(**SMALL, clip_qkv=1.0, hidden_act="quick_gelu"),
    "nemotron": lambda: hf.NemotronConfig(**SMALL, hidden_act="quick_gelu"),
    "persimmon": lambda: hf.PersimmonConfig(**SMALL, hidden_act="quick_gelu"),
    "biogpt": lambda: hf.BioGptConfig(**SMALL),
    "vaultgemma": lambda: hf.VaultGemmaConfig(
        **SMALL, head_dim=12, sliding_window=40, final_logit_softcapping=2.0, hidden_activation="quick_gelu"
    ),
    "axk1": lambda: hf.AXK1Config(
        **{**SMALL, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 12},
        **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1},
    ),
}
