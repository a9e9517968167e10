"""Writes a model to a GGUF file, without a vocabulary if llama.cpp is given token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Model types of transformers, with their names in GGUF.
_KINDS = {
    **{"llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"},
    **{"qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE"},
}
# Settings of mixtures in transformers, with the names under which they are written.
_MIXTURE = {
    **{"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def no_vocabulary(writer: Any) -> None:
    """Write that there is no tokenizer."""
    writer.add_tokenizer_model("none")


def write_gguf(
    model: Any, path: Path, kind_of: Callable[[str], str], vocabulary: Callable[[Any], None] = no_vocabulary
) -> None:
    """Write a model to a GGUF file.

    Args:
        model: a model of transformers.
        path: path of the file.
        kind_of: returns the type of a matrix, such as "F32" or "Q8_0", by its name in GGUF.
        vocabulary: writes the tokenizer.

    Raises:
        ValueError: if this kind of model cannot be converted here.
    """
    import gguf

    config = model.config
    if config.model_type not in _KINDS:
        raise ValueError(f"models of type {config.model_type} are not converted to GGUF, only {', '.join(_KINDS)}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not converted to GGUF")
    kind = getattr(gguf.MODEL_ARCH, _KINDS[config.model_type])
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _write_settings(writer, config, rope.get("rope_theta", 10000.0))
    vocabulary(writer)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        for part, some in _parts(name, _rotated(name, tensor.float().cpu(), config, kind == gguf.MODEL_ARCH.LLAMA)):
            target, values = names.get_name(part, try_suffixes=(".weight", ".bias")), some.contiguous().numpy()
            if target is None:
                raise ValueError(f"GGUF has no name for {part}")
            type_ = gguf.GGMLQuantizationType[kind_of(target) if values.ndim > 1 else "F32"]
            writer.add_tensor(target, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, config: Any, theta: float) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, called in _MIXTURE.items():
        if isinstance(value := getattr(config, name, None), int):
            getattr(writer, f"add_{called}")(value)


def _parts(name: str, weight: Any) -> list[tuple[str, Any]]:
    """Return a weight as llama.cpp stores it: gates and ups of experts apart, a gate with one row as a vector."""
    if name.endswith("experts.gate_up_proj"):
        gates, opened = weight.chunk(2, 1)
        before = name.removesuffix("gate_up_proj")
        return [(f"{before}gate_proj.weight", gates), (f"{before}up_proj.weight", opened)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name, weight[0] if name.endswith("shared_expert_gate.weight") else weight)]


def _rotated(name: str, weight: Any, config: Any, interleaved: bool) -> Any:
    """Return rows of query and key weights in llama.cpp's order for rotation: pairs are adjacent for Llama."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if not interleaved or heads is None:
        return weight
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)
