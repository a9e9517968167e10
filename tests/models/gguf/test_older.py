"""GGUF files of older families: the bits of their folders, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.gguf_files import check_same, loaded, plain_tokenizer
from helpers.gguf_models import Model, check_kept, check_stored, made_of
from helpers.small_models import STORED

from detgen.errors import EngineError
from detgen.models.gguf.configs import Said
from detgen.models.gguf.header import Entry, Header
from detgen.models.gguf.older import gptneox

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
SOME = ("falcon_7b", "falcon_40b", "bloom", "mpt", "gptneox", "starcoder")


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: plain_tokenizer(random_model(MODELS[name].config())))


@pytest.mark.parametrize("name", usual(SOME, MODELS))
def test_float32_gives_the_bits_of_the_folder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_same(made_of(MODELS[name], folders(name), tmp_path / "model.gguf"), folders(name))


@pytest.mark.parametrize("name", usual(["falcon_40b", "bloom"], MODELS))
def test_the_second_start_gives_the_same(
    name: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_kept(made_of(MODELS[name], folders(name), tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", usual(["falcon_7b"], MODELS))
def test_stored_weights_stand_for_their_numbers(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    check_stored(MODELS[name], folders(name), tmp_path, ("Q8_0", "Q5_1", "BF16"))


@pytest.mark.parametrize(("layers", "activation"), [(44, "gelu_fast"), (32, "gelu")])
def test_activation_of_gpt_neox(layers: int, activation: str) -> None:
    """Which no file says: that of the model with 20 billion parameters is another one."""
    said = {"block_count": layers, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96}
    said |= {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True}
    table = Entry("F32", (4096, 64), 0, 0)
    header = Header(
        "gptneox", {f"gptneox.{key}": value for key, value in said.items()}, {"token_embd.weight": table}, {}
    )
    config: Any = gptneox(Said(header), header, Path())
    assert config.hidden_act == activation


@pytest.mark.parametrize(
    ("name", "others", "more", "said"),
    [
        ("falcon_11b", {"rope.freq_base": None}, {}, r"falcon\.rope\.freq_base is missing"),
        ("falcon_7b", {"tensor_data_layout": "other"}, {}, r"tensor_data_layout = other is not understood"),
        ("falcon_7b", {"feed_forward_length": 96}, {}, r"feed_forward_length = 96 is not understood"),
        ("falcon_7b", {"attention.head_count_kv": 2, "rope.freq_base": 1e4}, {}, r"shape"),
        ("falcon_40b", {}, {"blk.1.attn_norm_2.bias": None}, r"weights are missing: .*h\.1\.ln_attn\.bias"),
        ("bloom", {"attention.head_count_kv": 2}, {}, r"head_count_kv = 2 is not understood"),
        ("bloom", {}, {"token_embd_norm.weight": None}, r"weights are missing: .*word_embeddings_layernorm\.weight"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, {}, r"max_alibi_bias = 0\.0 is not understood"),
        ("mpt", {"attention.max_alibi_bias": 16.0}, {}, r"max_alibi_bias = 16\.0 is not understood"),
        ("mpt", {"attention.max_alibi_bias": None}, {}, r"max_alibi_bias is missing"),
        ("mpt", {}, {"position_embd.weight": np.ones((512, 96), "f4")}, r"no such weights as position_embd\.weight"),
        ("gptneox", {"use_parallel_residual": None}, {}, r"use_parallel_residual is missing"),
        ("gptneox", {"rope.scaling.type": "yarn"}, {}, r"rope\.scaling\.factor is missing"),
        ("starcoder", {"attention.head_count_kv": 4}, {}, r"head_count_kv = 4 is not understood"),
    ],
)
def test_what_is_refused(
    name: str, others: dict[str, Any], more: dict[str, Any], said: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    path = made_of(MODELS[name], folders(name), tmp_path / "model.gguf", others, more)
    with pytest.raises(EngineError, match=f"^cannot load the model model.gguf: .*{said}"):
        loaded(path)
