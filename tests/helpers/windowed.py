"""Small models of all families of transformers that make masks with windows or chunks, and what they compute."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.loaded import LoadedModel
from detgen.program.arrays import array
from detgen.runner.preparing import Prepared, prepare

_MAKERS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
CONTEXT, VOCABULARY, LAYERS = 1024, 320, 4
_READ = 100  # rows of a pass
# What makes any family small, by what its configuration calls it.
SMALL: dict[str, Any] = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
    **{"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": CONTEXT},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2},
    **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "intermediate_size_mlp": 96},
    **{"moe_layers": [], "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "swa_head_dim": 16},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"max_window_layers": 2, "num_kv_shared_layers": 0, "n_shared_experts": 1, "routed_intermediate_size": 48},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    **{"router_hidden_size": 32, "adapter_out_dim": 64, "num_experts_per_token": 2, "index_topk": 16},
    **{"moe_num_experts": 4, "num_nextn_predict_layers": 0, "altup_num_inputs": 2, "activation_sparsity_pattern": None},
    **{"layer_types": None, "mlp_layer_types": None, "query_pre_attn_scalar": 16, "global_head_dim": 16},
}
_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LARGE = {"blt", "phi4_multimodal"}  # made of several models
# What single families need beyond that.
_OWN: dict[str, dict[str, Any]] = {
    "dots1": {"layer_types": _MIXED},
    "laguna": {"layer_types": _MIXED},
    "llama4_text": {"attn_temperature_tuning": False},  # which scales by the place in a pass
    "mellum": {"layer_types": _MIXED},
    "cohere_compass_text": {
        **{"layer_types": _MIXED, "num_attention_heads": 4},
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in set(_MIXED)},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"] * (LAYERS // 2), "num_experts_per_tok": 1},
}


@cache
def families() -> tuple[str, ...]:
    """A model type for each class whose file makes such masks."""
    found = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        made = getattr(hf, name if isinstance(name, str) else name[0], None)
        if inspect.isclass(made) and any(maker in Path(inspect.getfile(made)).read_text() for maker in _MAKERS):
            found[made] = kind
    return tuple(sorted(set(found.values()) - _LARGE))


def small(kind: str, window: int) -> Any:
    """A configuration with as few and as small parts as may be, whose windows or chunks are of that size."""
    config = hf.AutoConfig.for_model(kind)
    text = config.get_text_config()
    made = type(text)
    known = {**vars(text), **inspect.signature(made).parameters}
    own = _OWN.get(text.model_type, {})
    sizes = {**SMALL, **own, "sliding_window": window, "attention_chunk_size": window, "use_sliding_window": True}
    return made(**{name: value for name, value in sizes.items() if name in known or name in own})


def model(kind: str, window: int) -> Any:
    """Such a model with random weights, whose attention has a say."""
    torch.manual_seed(5)
    made = hf.AutoModelForCausalLM.from_config(small(kind, window), dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        elif "norm" in name:
            parameter.normal_(1.0, 0.3)
    return made


def prepared(made: Any, context: int = CONTEXT) -> Prepared:
    """The model's passes, over sequences of so many positions; it is spent.

    Raises:
        EngineError: if it is not supported.
    """
    loaded = LoadedModel("it", made, None, "", context, frozenset())
    kwargs: dict[str, Any] = {"batch_size": 1, "kv_memory": 64 << 20}
    return prepare(loaded, None, CPU, **kwargs)


@torch.inference_mode()
def own(made: Any, ids: list[int]) -> np.ndarray:
    """Logits of a prompt by the model's eager forward, float32 [tokens, vocabulary]."""
    made.set_attn_implementation("eager")
    return array(made(torch.tensor([ids]), use_cache=False).logits[0])


def packed(passes: Prepared, ids: list[int]) -> np.ndarray:
    """The same by packed passes."""
    forward = passes.runners[0]
    forward.cache.pages.lay_out(1, len(ids))
    parts = [(at, ids[at : at + _READ]) for at in range(0, len(ids), _READ)]
    return np.concatenate([forward.run([Window(0, at, part, len(part))]) for at, part in parts])
