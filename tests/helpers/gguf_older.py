"""Models of older families, as llama.cpp's converter makes files of them, for tests."""

from __future__ import annotations

import transformers as hf

from helpers.gguf_models import Model
from helpers.small_models import STORED

SIZES = {name: STORED[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "eos_token_id")}
SIZES |= {"num_hidden_layers": 3}
WIDTH = {"feed_forward_length": 4 * SIZES["hidden_size"]}
SAID = {**WIDTH, "rope.freq_base": None}
LAID = {**SAID, "tensor_data_layout": "jploski"}
NEOX = {"use_parallel_residual": True, "rope.dimension_count": 4, "rope.freq_base": None}
MODELS = {
    "falcon_7b": Model("falcon", lambda: hf.FalconConfig(**SIZES), {**LAID, "attention.head_count_kv": 1}),
    "falcon_40b": Model(
        "falcon", lambda: hf.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2), LAID
    ),
    "falcon_11b": Model(  # with one norm, and a base that files of today do not say
        "falcon",
        lambda: hf.FalconConfig(
            **{**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            rope_parameters={"rope_type": "default", "rope_theta": 5e3},
        ),
        {**LAID, "rope.freq_base": 5e3},
    ),
    "bloom": Model(
        "bloom",
        lambda: hf.BloomConfig(vocab_size=4096, hidden_size=96, n_layer=3, n_head=6, eos_token_id=0),
        {"feed_forward_length": 384, "context_length": 96, "attention.head_count_kv": 6},
    ),
    "mpt": Model(
        "mpt",
        lambda: hf.MptConfig(vocab_size=4096, d_model=96, n_layers=3, n_heads=6, max_seq_len=512, eos_token_id=0),
        {"feed_forward_length": 384, "attention.max_alibi_bias": 8.0},
    ),
    "gptneox": Model("gptneox", lambda: hf.GPTNeoXConfig(**SIZES, intermediate_size=96), NEOX),
    "gptneox_serial": Model(
        "gptneox",
        lambda: hf.GPTNeoXConfig(
            **{**SIZES, "intermediate_size": 96, "use_parallel_residual": False},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        {**NEOX, "use_parallel_residual": False, "rope.dimension_count": 8},
    ),
    "starcoder": Model(
        "starcoder",
        lambda: hf.GPTBigCodeConfig(vocab_size=4096, n_embd=64, n_layer=3, n_head=4, n_positions=96, eos_token_id=0),
        {**WIDTH, "attention.head_count_kv": 1},
    ),
    "exaone": Model(
        "exaone",
        lambda: hf.LlamaConfig(**STORED),
        {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-6, "rope.dimension_count": 16}
        | dict.fromkeys(("attention.key_length", "attention.value_length")),
        tables="llama",
    ),
}
