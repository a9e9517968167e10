"""What a family's row does not tell of a model: it is named, and no program is built."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf
from helpers.families import DESCRIBED, LLAMA, NEMOTRON_H, NETS, ROUTED, ROWS

from detgen.models.description import describe, unknown_in
from detgen.models.stored import without_weights
from detgen.program.arrays import FLOAT32

SOLAR = {**ROUTED, "head_dim": 18, "n_routed_experts": 6, "n_shared_experts": 1}
UNKNOWN: dict[str, tuple[Any, str]] = {
    "no layers": (hf.LlamaConfig(**{**LLAMA, "num_hidden_layers": 0}), "a decoder without layers"),
    "one entry": (hf.LlamaConfig(**LLAMA, head_dim=1), "a rotation of more than a head has"),
    "no experts": (hf.MixtralConfig(**LLAMA, num_experts_per_tok=0), "0 of 8 experts, where 1 to 64 can be taken"),
    "none beside": (
        hf.Gemma4TextConfig(**DESCRIBED["gemma4_experts"]().to_dict() | {"top_k_experts": 0}),
        "0 of 5 experts, where 1 to 64 can be taken",
    ),
    "many picks": (
        hf.MixtralConfig(**LLAMA, num_local_experts=80, num_experts_per_tok=65),
        "65 of 80 experts, where 1 to 64 can be taken",
    ),
    "many experts": (hf.MixtralConfig(**LLAMA, num_local_experts=4097), "more than 4096 experts"),
    "small groups": (hf.SolarOpenConfig(**SOLAR, n_group=3), "groups of 2 experts, which are too small for 3 of them"),
    "no group": (hf.NemotronHConfig(**NEMOTRON_H, topk_group=0), "0 of 1 groups by 1 of 6 experts"),
    "no shared experts": (
        hf.AfmoeConfig(**{**ROUTED, "num_experts": 6, "num_shared_experts": 0}),
        "a linear layer without inputs or outputs",
    ),
    "activation": (hf.LlamaConfig(**LLAMA, hidden_act="quick_gelu"), "activation QuickGELUActivation"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_no_step_computes_is_unknown(kind: str) -> None:
    config, what = UNKNOWN[kind]
    model = without_weights(config, FLOAT32)
    assert (describe(model), unknown_in(model)) == (None, what)


def test_heads_of_which_nothing_is_rotated() -> None:
    """A quarter of two entries is none of them."""
    found = describe(without_weights(hf.Qwen3_5TextConfig(**{**NETS, "head_dim": 2}), FLOAT32))
    assert found is not None
    assert found.layer(1).mixers[0].rotary is None  # type: ignore[union-attr]


def test_nothing_is_unknown_where_there_is_no_row() -> None:
    assert unknown_in(without_weights(hf.BioGptConfig(vocab_size=64), FLOAT32)) is None
    assert unknown_in(without_weights(hf.LlamaConfig(**LLAMA), FLOAT32)) is None


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mpt", "gptj", "codegen", "gpt_neo"])
def test_a_setting_that_the_family_does_not_read(family: str) -> None:
    """A file may have it all the same; heads follow from the weights."""
    config = DESCRIBED[family]() if family in DESCRIBED else ROWS[family]()
    config.num_key_value_heads = 1
    found = describe(without_weights(config, FLOAT32))
    assert found is not None
    attention = found.layer(0).mixers[0]
    assert attention.kv_heads == attention.heads  # type: ignore[union-attr]
