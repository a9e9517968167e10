"""Folders of adapters: what cannot be merged, and what is wrong, is one line that names file, setting and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import adapters
from safetensors.torch import save_file

from detgen import EngineError
from detgen.models.adapter_files import check_adapter
from detgen.models.folders import check_folder

Q = "model.layers.0.self_attn.q_proj"
TENSORS = adapters.factors({Q: (64, 64)})
A, B = (f"{adapters.PREFIX}{Q}.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "LOHA"}, 'peft_type is "LOHA", and only LORA can be merged here; merge it by PEFT'),
        ({"peft_type": None}, "peft_type is null"),
        ({"use_dora": True}, "use_dora is set: DoRA, .* cannot be merged here; merge it by PEFT"),
        ({"bias": "all"}, 'bias is "all": biases that were trained cannot be merged here; merge it by PEFT'),
        ({"lora_bias": True}, "lora_bias is set: factors with biases"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is set: .* such as experts"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"use_newest": True}, "use_newest is set, and nothing is known of it here"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights .* which changes the model's own weights, too"),
        ({"r": 0}, "r must be a whole number of at least 1, got 0"),
        ({"r": 5}, r"lora_A.weight is \[4, 64\], and its rank in adapter_config.json is 5"),
        ({"lora_alpha": "8"}, 'lora_alpha must be a finite number, got "8"'),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, got NaN"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern: q_proj must be a whole number"),
        ({"rank_pattern": {"(a+)+": 4}}, "could take forever"),
        ({"rank_pattern": {".*.*.*.*.*": 4}}, "could take forever"),
        ({"rank_pattern": {"(": 4}}, "is not a regular expression"),
        ({"target_modules": ["v_proj"]}, "q_proj has factors, and target_modules .* does not name it"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=rf"cannot use the adapter .*: adapter_\w+\.\w+: .*{said}"):
        check_adapter(adapters.write(tmp_path / "a", TENSORS, **settings), None)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({A: TENSORS[A]}, r"q_proj.lora_B.weight is missing"),
        ({B: TENSORS[B]}, r"q_proj.lora_A.weight is missing"),
        ({"x": TENSORS[A]}, "no tensor is a factor"),
        (
            TENSORS | {A.replace("_A", "_embedding_A").removesuffix(".weight"): TENSORS[A].clone()},
            "of an embedding, cannot be",
        ),
        (TENSORS | {A.replace("lora_A", "lora_magnitude_vector"): torch.ones(64)}, "which is not a factor of a linear"),
        (TENSORS | {A: TENSORS[A].int()}, "must be of F32, F16 or BF16"),
        (TENSORS | {A: TENSORS[A][0].contiguous()}, r"is \[64\], and its rank"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(EngineError, match=rf"adapter_model\.safetensors: .*{said}"):
        check_adapter(adapters.write(tmp_path / "a", tensors), None)


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def a_list(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_weights, "adapter_model.safetensors is not in this folder; give one as PEFT saves it"),
        (a_pickle, "adapter_model.bin: this is a pickle, which could run code; save the adapter as safetensors"),
        (cut, "adapter_model.safetensors: it is cut short"),
        (a_list, "adapter_config.json: it must hold an object"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = adapters.write(tmp_path / "a", TENSORS)
    damage(folder)
    with pytest.raises(EngineError, match=said):
        check_adapter(folder, None)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no such folder; give --adapter one with adapter_config"):
        check_adapter(tmp_path / "a", None)
    (tmp_path / "f").write_text("x", encoding="utf-8")
    with pytest.raises(EngineError, match="this is not a folder"):
        check_adapter(tmp_path / "f", None)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    """Whoever gives it as one is told of both options."""
    folder = adapters.write(tmp_path / "a", TENSORS)
    with pytest.raises(EngineError, match="this is an adapter; give its model as --target, and this"):
        check_folder(folder, "a", trusted=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    save_file(TENSORS, folder / "model.safetensors")
    with pytest.raises(EngineError, match="an adapter of another model; give that as --target, and this as --adapter"):
        check_folder(folder, "a", trusted=False)
