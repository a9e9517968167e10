"""Latent attention keeps one key for all heads, and computes with weights of heads what expanded keys would give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from helpers.examples import usual
from helpers.families import LATENT, LLAMA, ROUTED

from detgen import Engine
from detgen.errors import DTypeName, QuantName
from detgen.kernels.c.quantizing import MADE, Form
from detgen.models.latent import narrowed_by_head
from detgen.models.loading import load_model
from detgen.models.stored import whole
from detgen.program.arrays import array, same_bits, tensor
from detgen.program.operands import Weight
from detgen.program.steps import Attend, HeadLinear
from detgen.program.storage import Storage
from detgen.program.widening import in_floats

SHORT, TURNED, PLAIN, VALUES = 64, 8, 32, 96
SIZES: dict[str, Any] = LATENT | {
    **{"kv_lora_rank": SHORT, "qk_rope_head_dim": TURNED, "qk_nope_head_dim": PLAIN, "v_head_dim": VALUES},
}
ROUTES = {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}


@pytest.fixture(scope="module")
def folders(random_model: Callable[..., Path]) -> dict[str, Path]:
    return {
        "minicpm3": random_model(hf.MiniCPM3Config(**LLAMA | SIZES)),
        "glm4_moe_lite": random_model(hf.Glm4MoeLiteConfig(**ROUTED | SIZES | ROUTES)),
    }


def steps_of(engine: Engine) -> list[Any]:
    decoder: Any = engine.canonical.decoder
    steps: list[Any] = decoder.program().steps
    return steps


def unpacked(weight: Weight) -> np.ndarray:
    """What the weight of each head stands for, [heads, outputs, inputs]."""
    data = tensor(in_floats(weight).data) if weight.storage.rounds else tensor(weight.data).float()
    return array(data.transpose(-3, -2).flatten(-2)[..., : weight.outputs].mT.contiguous())


@pytest.mark.parametrize(
    ("family", "dtype", "quant", "storage"),
    usual(
        [("minicpm3", "float32", "none", Storage.FLOAT), ("glm4_moe_lite", "float32", "q8", Storage.BYTE)],
        [
            ("minicpm3", "float32", "q4_k", Storage.NIBBLE),
            ("minicpm3", "bfloat16", "none", Storage.PAIR),
            ("minicpm3", "float16", "none", Storage.HALF),
            ("glm4_moe_lite", "bfloat16-tc25", "none", Storage.TC25),
            ("glm4_moe_lite", "float32", "q4", Storage.NIBBLE),
            ("glm4_moe_lite", "float32", "nf4", Storage.FLOAT),
        ],
    ),
)
def test_it_is_the_model(
    family: str, dtype: DTypeName, quant: QuantName, storage: Storage, folders: dict[str, Path]
) -> None:
    """Logits are those of the model's own forward, or the engine would refuse it; weights of heads are like others."""
    loaded = load_model(folders[family], "it", dtype, quant)
    given = next(p for name, p in loaded.model.named_parameters() if name.endswith("kv_b_proj.weight"))
    few = quant == "nf4" or dtype.startswith("bfloat16")
    wanted = None if few else narrowed_by_head(whole(loaded.read(given)), loaded.form, size=PLAIN + VALUES, plain=PLAIN)
    engine = Engine(target=loaded, drafter="none", kv_memory=8 << 20)
    steps = steps_of(engine)
    of_heads = [step for step in steps if isinstance(step, HeadLinear)]
    assert [step.passed for step in of_heads] == [TURNED, 0] * LLAMA["num_hidden_layers"]
    assert of_heads[0].weight.storage == storage
    cache = next(step.cache for step in steps if isinstance(step, Attend))
    assert (cache.heads, cache.kv_heads, cache.size, cache.values) == (4, 1, TURNED + SHORT, SHORT)
    assert cache.kept is None
    assert engine.position_bytes == len(of_heads) // 2 * (TURNED + SHORT) * engine.canonical.cache.dtype.itemsize
    if wanted is not None:
        keys, values = (unpacked(step.weight) for step in of_heads[:2])
        assert same_bits(np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(wanted.shape), wanted)


@pytest.mark.parametrize("form", ["none", *MADE])
def test_weights_of_heads_are_narrowed_along_their_inputs(form: Form) -> None:
    """Keys by what queries have, values by the short vector: a group has one scale."""
    weight = np.random.default_rng(1).standard_normal((2 * (PLAIN + VALUES), SHORT), np.float32)
    found = narrowed_by_head(weight, form, size=PLAIN + VALUES, plain=PLAIN).reshape(2, -1, SHORT)
    keys, values = found[:, :PLAIN], found[:, PLAIN:]
    most = {"none": PLAIN, "q8": PLAIN, "q4": 16, "q4_k": 16}[form]  # different numbers of a group
    assert max(len(np.unique(group)) for group in keys.swapaxes(1, 2).reshape(-1, PLAIN)) <= most
    assert max(len(np.unique(group)) for group in values.reshape(-1, 32)) <= most
    assert np.abs(found - weight.reshape(found.shape)).max() < {"none": 1e-9, "q8": 0.03}.get(form, 0.6)


def test_the_draft_in_fewer_bits_sees_the_same_cache(folders: dict[str, Path]) -> None:
    """A model that drafts for itself gives what it gives alone."""
    for family, folder in folders.items():
        texts = []
        for drafter in ("none", "self"):
            engine = Engine(target=folder, drafter=drafter, kv_memory=8 << 20)
            texts.append([one.text for one in engine.generate(["The first", "Once upon a time"], max_tokens=12)])
        assert texts[0] == texts[1], family
