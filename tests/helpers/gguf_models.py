"""Models of families whose GGUF files detgen reads by itself, as llama.cpp's converter makes these files, for tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from detgen.models.loading import load_model
from detgen.models.wrappers import auto_class
from detgen.program.arrays import same_bits
from helpers.gguf_files import bits_of, loaded, write_vocabulary, written

KEYS = {  # what settings are called, and what configurations call them
    "block_count": "num_hidden_layers n_layer n_layers",
    "context_length": "max_position_embeddings n_positions max_seq_len",
    "embedding_length": "hidden_size n_embd d_model",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads n_head n_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling logit_scale",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_count": "n_routed_experts num_local_experts num_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_topk moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor route_scale router_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "interleave_moe_layer_step": "interleave_moe_layer_step moe_layer_interval",
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "attention.temperature_scale": "llama_4_scaling_beta",
}


class Model(NamedTuple):
    """A model of a family.

    Attributes:
        kind: llama.cpp's architecture.
        config: its configuration.
        others: settings besides `KEYS`, or instead of them.
        in_turns: whether files have side by side what queries and keys rotate together.
        fused: whether experts' gates and what they open are in one tensor.
        more: tensors that no parameter is.
        tables: the architecture that calls tensors the same, where the gguf package does not know that one.
    """

    kind: str
    config: Callable[[], Any]
    others: Mapping[str, Any] = {}
    in_turns: bool = False
    fused: bool = False
    more: Mapping[str, np.ndarray] = {}
    tables: str = ""


def told(model: Model) -> dict[str, Any]:
    """What llama.cpp's converter writes of a configuration."""
    config = model.config()
    rope = getattr(config, "rope_parameters", None) or {}
    known = {**config.to_dict(), **rope.get("full_attention", rope)}
    found = {key: [known[n] for n in names.split() if known.get(n) is not None] for key, names in KEYS.items()}
    return {key: values[0] for key, values in found.items() if values} | dict(model.others)


@lru_cache(maxsize=16)  # many files are made of a folder
def _whole(of: Any, folder: Path) -> Any:
    return of.from_pretrained(folder)


def tensors_of(folder: Path, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """What llama.cpp's converter makes of the tensors."""
    whole = _whole(auto_class(model.config()), folder)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == (model.tables or model.kind))
    names = gguf.get_tensor_name_map(kind, whole.config.num_hidden_layers)
    state = whole.state_dict()
    for stack in ("altup_projections", "altup_unembed_projections"):
        if stacked := [state.pop(name).numpy() for name in sorted(state) if f".{stack}." in name]:
            state[f"model.{stack}.weight"] = torch.from_numpy(np.stack(stacked))
    for name, tensor in state.items():
        if name == "lm_head.weight" and whole.config.tie_word_embeddings:
            continue
        for part, numbers in parts_of(name, tensor.numpy(), whole, model):
            told_as = part if part.endswith((".weight", ".bias", "_b")) else f"{part}.weight"
            known = (told_as, told_as.removeprefix("transformer."))  # which files of Bloom are made without
            found = (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in known)
            yield next(filter(None, found), part), numbers


def parts_of(name: str, numbers: np.ndarray, whole: Any, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """A parameter as a file has it: names that the tables know, or those of the file."""
    block, (path, _, last) = f"blk.{name.split('.')[2]}" if ".layers." in name else "", name.rpartition(".")
    if last in ("gate_up_proj", "down_proj"):
        if path.endswith("feed_forward.experts"):  # of Llama 4
            numbers = numbers.swapaxes(1, 2)
        if last == "down_proj":
            yield f"{block}.ffn_down_exps.weight", numbers
        elif model.fused:
            yield f"{block}.ffn_gate_up_exps.weight", numbers
        else:
            yield from zip(
                (f"{block}.ffn_{one}_exps.weight" for one in ("gate", "up")), np.split(numbers, 2, 1), strict=True
            )
    elif name.endswith("shared_mlp.input_linear.weight"):
        yield from zip((f"{block}.ffn_{one}_shexp.weight" for one in ("gate", "up")), np.split(numbers, 2), strict=True)
    elif name.endswith(".router.weight") and "feed_forward" not in name:
        yield f"{block}.ffn_gate_inp.weight", numbers
    elif last in ("e_score_correction_bias", "expert_bias"):
        yield f"{block}.exp_probs_b" + ".bias" * (model.kind != "hy_v3"), numbers.ravel()
    elif path.endswith("query_key_value"):
        yield name, apart(numbers, whole.config)
    elif name.endswith("kv_b_proj.weight") and "attention.value_length_mla" in model.others:
        heads, keys = whole.config.num_attention_heads, whole.config.qk_nope_head_dim
        both = numbers.reshape(heads, -1, numbers.shape[-1])
        yield f"{block}.attn_k_b.weight", both[:, :keys].swapaxes(1, 2)
        yield f"{block}.attn_v_b.weight", both[:, keys:]
    elif model.in_turns and path.endswith(("q_proj", "k_proj")):
        size = getattr(whole.config, "head_dim", None) or numbers.shape[-1] // whole.config.num_attention_heads
        size = size if numbers.ndim > 1 else whole.model.layers[0].self_attn.head_dim
        yield name, numbers.reshape(-1, 2, size // 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    else:
        yield name, numbers


def apart(numbers: np.ndarray, config: Any) -> np.ndarray:
    """Queries of all heads, then their keys, then their values, of what a model has by key heads."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_kv_heads", heads)
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        keys = 1
    by_keys = numbers.reshape(keys, heads // keys + 2, -1, *numbers.shape[1:])
    parts = by_keys[:, :-2], by_keys[:, -2], by_keys[:, -1]
    return np.concatenate([part.reshape(-1, *numbers.shape[1:]) for part in parts])


def made_of(
    model: Model,
    folder: Path,
    path: Path,
    others: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray | None] | None = None,
    *,
    pre: str = "gpt-2",
    **how: Any,
) -> Path:
    """A GGUF file of a folder, with other settings and more tensors, or fewer, for None; see `written`."""
    tensors = {**dict(tensors_of(folder, model)), **model.more, **(more or {})}
    there = [(tensor, numbers) for tensor, numbers in tensors.items() if numbers is not None]
    vocabulary = partial(write_vocabulary, folder, pre=pre)
    return written(path, model.kind, told(model) | dict(others or {}), there, vocabulary, **how)


def check_kept(path: Path) -> None:
    """A model that is made of what is kept of its file gives the bits and tokens that it gave before."""
    first = load_model(path, path.name, "auto", "none", role="target")
    wanted = bits_of(first)
    second = load_model(path, path.name, "auto", "none", role="target")
    assert (first.own, second.own is not None) == (None, True)
    assert same_bits(bits_of(second), wanted)
    for text in ("def  x1234\n\n", "\u00e9 \u4e2d\u6587<|end|>"):
        assert second.tokenizer(text).input_ids == first.tokenizer(text).input_ids


def check_stored(model: Model, folder: Path, to: Path, kinds: tuple[str, ...]) -> None:
    """Weights in few bits give the bits of what they stand for."""

    def kind_of(tensor: str) -> str:
        return kinds[zlib.crc32(tensor.encode()) % len(kinds)]

    paths = [
        made_of(model, folder, to / f"{widened}.gguf", kind_of=kind_of, widened=widened) for widened in (False, True)
    ]
    file, same = map(loaded, paths)
    assert same_bits(bits_of(file), bits_of(same))
