"""GGUF files of older families: what is refused, and an activation that no file says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_alike import made
from helpers.gguf_files import check_refused

from detgen.models.gguf.configs import Said
from detgen.models.gguf.header import Entry, Header
from detgen.models.gguf.older import gptneox


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
    check_refused(made(name, folders(name), tmp_path / "model.gguf", others, more), said)
