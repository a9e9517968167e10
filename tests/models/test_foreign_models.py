"""Families with something of their own: they give transformers' logits, or are refused by what they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers.examples import usual
from helpers.small_models import SIZES
from safetensors.torch import load_file, save_file
from torch import nn

from detgen import Engine, EngineError
from detgen.models.refusing import refusing

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import families
import tiny_families

GPT2 = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "scale_attn_weights")


def found(folder: Path, family: str, **others: Any) -> dict[str, Any]:
    tiny_families.save(tiny_families.tiny_config(family, **others), folder)
    return families.run(folder)


@pytest.mark.parametrize("setting", [{}, {GPT2[0]: True}, {GPT2[1]: True}, {GPT2[2]: False}])
def test_gpt2_with_a_padding_token(tmp_path: Path, setting: dict[str, bool]) -> None:
    assert found(tmp_path, "gpt2", pad_token_id=4000, **setting)["status"] == families.WHOLE


def test_masks_in_the_files_of_gpt_neo(tmp_path: Path) -> None:
    """As older versions of transformers kept them with the weights; no module has them now."""
    tiny_families.save(tiny_families.tiny_config("gpt_neo"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for i in range(4):
        of = f"transformer.h.{i}.attn.attention"
        weights |= {f"{of}.bias": torch.ones(1, 1, 512, 512, dtype=torch.bool), f"{of}.masked_bias": torch.tensor(-1e9)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert families.run(tmp_path)["status"] == families.WHOLE


def test_a_padding_token_behind_the_probed_ones(tmp_path: Path) -> None:
    """The embedding of Phi-3 knows it; while weights are read a few rows at a time, it is outside the table."""
    assert found(tmp_path, "phi3", pad_token_id=4000)["status"] == families.WHOLE


def test_norms_without_weights(tmp_path: Path) -> None:
    """OPT's, as Galactica has them."""
    plain = {"layer_norm_elementwise_affine": False, "enable_bias": False, "activation_function": "gelu"}
    assert found(tmp_path, "opt", **plain)["status"] == families.WHOLE


@pytest.mark.parametrize(("least", "status"), [(1e-12, families.WHOLE), (0.3, families.OWN)])
def test_a_least_sum_of_weights_of_experts(tmp_path: Path, least: float, status: str) -> None:
    """Which few rows may come near, so that a comparison of some would not tell."""
    assert found(tmp_path, "ernie4_5_moe", moe_norm_min=least)["status"] == status


@pytest.mark.parametrize(
    "family",
    usual(
        [
            "cohere_compass_text",  # three positions a token
            "whisper",  # more decoder layers than `num_hidden_layers`, and no choice of rows
        ],
        [
            "gemma3n_text",  # layers that see the keys and values of others, here with another activation
            "granite_swa",  # sinks, and rotary embeddings of layers, which it asks for their settings
            "axk1",  # experts of a size that transformers' faster ways refuse
        ],
    ),
)
def test_it_runs_by_its_own_forward(tmp_path: Path, family: str) -> None:
    others = {
        "gemma3n_text": {"hidden_activation": "quick_gelu", "num_hidden_layers": 6, "num_kv_shared_layers": 1},
        "granite_swa": {"hidden_act": "quick_gelu"},
        "axk1": {"moe_intermediate_size": 21},
        "whisper": {"encoder_layers": 1, "num_hidden_layers": 1},
    }
    assert found(tmp_path, family, **others.get(family, {}))["status"] == families.OWN


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", "it computes with the mask of its attention"),
        ("roberta", "it does not count positions from 0"),
        ("longcat_flash", "not row-invariant by its own forward"),
        ("mixtral", "not row-invariant by its own forward: aten._local_scalar_dense"),
    ],
)
def test_refused_by_what_it_is(tmp_path: Path, family: str, reason: str) -> None:
    others = {"mixtral": {"hidden_act": "mish", "intermediate_size": 21}}
    result = found(tmp_path, family, **others.get(family, {}))
    assert result["status"] == families.REFUSED
    assert reason in result["says"]


class Strange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.missing]  # type: ignore[index]


def test_what_a_module_raises_is_a_refusal_and_what_we_raise_is_not() -> None:
    said = r"model \(X\) is not supported: its Strange does not .*at `return x\[self"
    with pytest.raises(EngineError, match=said), refusing("model (X)"):
        nn.Sequential(Strange())(torch.zeros(3))
    with pytest.raises(ZeroDivisionError), refusing("model (X)"):
        _ = 1 / 0


def test_a_setting_that_a_module_stumbles_over(random_model: Callable[..., Path]) -> None:
    """The message says where."""
    folder = random_model(hf.HunYuanDenseV1Config(**SMALL, head_dim=16))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 16', '"head_dim": null'))
    with pytest.raises(EngineError, match=r"in its HunYuanDenseV1Attention, at `self.scaling = self.head_dim\*\*-0.5`"):
        Engine(target=folder, drafter="none", kv_memory=16 << 20)


SMALL = SIZES | {"vocab_size": 320}
