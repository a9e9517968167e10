"""Makes a tiny configuration and random weights of every decoder that transformers maps to causal language models.

Sizes are derived: fields of the family's own configuration, and of configurations inside it, are made small by their
names. `OTHERS` has what fields must be because of other fields.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from detgen.errors import DEMO
from detgen.models.wrappers import settings_of_text

VOCABULARY = 4096  # of the embedded tokenizer, which all of them use
WINDOW = 24  # of sliding windows and chunks: shorter than most prompts
_LAYERS = 3

# Sizes of fields by patterns of their names; the first match counts. None leaves a field as it is.
_SIZES: list[tuple[str, int | None]] = [
    (r"(text_|unpadded_)?vocab_size|n_vocab", VOCABULARY),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|word_embed_proj_dim|embedding_size|n_hidden|hidden_size_global",
        64,
    ),
    (r"(encoder_|decoder_)?(ffn_dim|layers_ffn)|d_ff|dff|dim_ff|d_inner|n_inner|ffn_hidden_size", 96),
    (r"intermediate_size|intermediate_size_mlp|dense_intermediate_size", 96),
    (r"(moe_|shared_|expert_|moe_shared_expert_|shared_experts?_)+(intermediate_size|ffn_hidden_size)", 48),
    (r"num_(hidden_)?layers|n_layers?|(encoder|decoder)_layers|num_(encoder|decoder)_layers|depth|num_blocks", _LAYERS),
    (r"num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads", 4),
    (r"swa_num_attention_heads|num_(encoder|decoder)_attention_heads", 4),
    (r"(swa_|num_)?(num_)?key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads", 2),
    (r"(swa_|global_)?head_dim|dim_head|kv_channels|d_kv", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_head_dim", 24),
    (r"[qo]_lora_rank|kv_lora_rank", 24),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|model_max_length|max_length", 512),
    (r"original_max_position_embeddings", 512),
    (
        r"sliding_window(_size)?|window_size|attention_chunk_size|local_attention(_window_len)?|attention_window_size",
        WINDOW,
    ),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", 8),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|num_selected_experts|top_k_experts", 2),
    (r"n_group|num_expert_group|topk_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"index_head_dim", 16),
    (r"index_n_heads", 4),
    (r"index_topk", 16),
    (r"linear_(num_)?(key|value)_heads|linear_num_(key|value)_heads|linear_num_heads|mamba_n_heads|n_mamba_heads", 4),
    (r"mamba_num_heads", 8),
    (r"mamba_head_dim|mamba_d_head", 16),
    (r"linear_(key|value)_head_dim|linear_head_dim", 16),
    (r"mamba_d_state|state_size|ssm_state_size", 16),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"hidden_size_per_layer_input|laurel_rank", 16),
    (r"num_codebooks|max_2d_position_embeddings|encoder_layerdrop|chunk_size_feed_forward", None),
    (r"image_size", 32),
    (r"type_vocab_size", None),
    (r"audio_vocab_size|codebook_size", 64),
    (r"vocab_offset", 64),
]

# What families need in addition, or instead; a dot leads into a configuration inside.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}  # their product is twice the hidden size
_GEMMA4 = {  # the assistants', which have no default
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 6},
    **{"max_position_embeddings": 512, "sliding_window": WINDOW},
}
_DOTS_VISION = {
    "vision_config.num_hidden_layers": 42,
    "vision_config.patch_size": 14,
    "vision_config.adapter_in_dim": 64,
    "vision_config.adapter_out_dim": 64,
    "audio_config.adapter_input_size": 64,
    "audio_config.adapter_out_dim": 64,
}
_INDEXER = {
    **{"num_key_value_heads": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {"text_config.num_key_value_heads": 4, **_DOTS_VISION},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n": {"text_config.num_hidden_layers": 10, "text_config.num_kv_shared_layers": 5},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gemma4": {"text_config.global_head_dim": 32},
    "gemma4_assistant": {"text_config": _GEMMA4},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified": {"text_config.global_head_dim": 32},
    "gemma4_unified_assistant": {"text_config": _GEMMA4},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mllama": {"text_config.cross_attention_layers": [1, 9]},
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 64},
    "rwkv": {"attention_hidden_size": 64},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}


# Families of which transformers can make no model from the configuration that it maps them to.
UNMADE = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}


def _size(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _fields(default: Any) -> dict[str, Any]:
    """Return small values for the fields of a configuration."""
    subs = getattr(default, "sub_configs", None) or {}
    found: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in ("head_dim", "num_key_value_heads", "num_experts_per_tok") and value is None:
            found[name] = _size(name)
        if name in subs or hasattr(value, "to_dict"):
            if value is not None and hasattr(value, "to_dict"):
                found[name] = _fields(value)
            continue
        if re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int):
            found[name] = value if value < 64 else 3000 + sum(map(ord, name)) % 1000
        elif type(value) is int and (size := _size(name)) is not None and value > 0:
            found[name] = min(size, value) if name != "vocab_size" else size
    given = vars(default)
    if {"head_dim", "qk_rope_head_dim"} <= found.keys() and given["head_dim"] == given["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _layers(default: Any) -> int:
    """Return a number of layers such that there is one of each kind."""
    most = _LAYERS
    for value in vars(default).values():
        if isinstance(value, list) and value and all(isinstance(kind, str) for kind in value):
            most = max(most, *(value.index(kind) + 1 for kind in set(value)))
    return most


def _merge(fields: dict[str, Any], others: dict[str, Any]) -> None:
    for name, value in others.items():
        *path, last = name.split(".")
        at = fields
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value


def _deepened(fields: dict[str, Any], default: Any) -> None:
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in fields:
            fields[name] = min(_layers(default), 8)
    for name, value in fields.items():
        if isinstance(value, dict):
            _deepened(value, getattr(default, name))


def tiny_config(family: str, **others: Any) -> Any:
    """Return a tiny configuration.

    Args:
        family: a name in transformers' mapping of causal language models.
        others: other values of fields.
    """
    kind = CONFIG_MAPPING[family]
    try:
        default = kind()
    except Exception:  # it has no default: the table must suffice
        return kind(**OTHERS.get(family, {}), **others)
    fields = _fields(default)
    _deepened(fields, default)
    if getattr(default, "pad_token_id", 0) is None:
        fields["pad_token_id"] = 4000
    if getattr(default, "is_decoder", None) is False:
        fields["is_decoder"] = True
    _merge(fields, OTHERS.get(family, {}))
    _merge(fields, others)
    return kind(**fields)


def save(config: Any, folder: Path, seed: int = 0) -> Any:
    """Write a model with random weights and the embedded tokenizer; return the model.

    Weights are scaled so that attention and the layers after it influence the logits.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings_of_text(config)).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            if p.dim() > 1:
                p.copy_(noise * 1.5 * p.shape[-1] ** -0.5)
            elif "A_log" not in name:
                p.add_(noise * 0.1)
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # since the model may have taken only a part of it
    _add_tokenizer(folder)
    return model


def save_config(family: str, folder: Path) -> None:
    """Write a family's configuration and a file without its weights, if transformers can make no model of it."""
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    save_file({"weight": torch.zeros(1 << 20)}, folder / "model.safetensors", metadata={"format": "pt"})
    _add_tokenizer(folder)


def _add_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / file, folder / file)
