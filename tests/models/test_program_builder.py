"""Weights of one model that are stored in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.oracle import comparing
from helpers.small_models import STORED
from safetensors.torch import load_file, save_file
from torch import nn

from detgen.errors import DTypeName
from detgen.kernels.c.quantizing import Quantized
from detgen.kernels.drawn_weights import InFewBits, in_few_bits
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model
from detgen.models.stored import ALL, Weight
from detgen.program.arrays import array, floats, tensor
from detgen.program.operands import GROUP, Step, address
from detgen.program.steps import Embed, EmbedColumn, Linear
from detgen.program.storage import Storage
from detgen.runner.preparing import prepare

Kinds = dict[str, InFewBits]  # by the end of a parameter's name
Q4_K: InFewBits = (Storage.NIBBLE, Storage.BYTE, GROUP, True)
Q6_K: InFewBits = (Storage.SIX, Storage.BYTE, GROUP // 2, False)
Q8_0: InFewBits = (Storage.BYTE, Storage.HALF, GROUP, False)
PROMPT = list(range(3, 20))
SIZES = STORED | {"hidden_size": 256, "vocab_size": 320}


def quantized(weight: np.ndarray, kind: InFewBits) -> Quantized:
    """Any weights of a kind, of the magnitude of others."""
    made = in_few_bits(1, *weight.shape, *kind)
    factor = float(floats(weight).std() / made.weight().std())
    return made._replace(scales=made.scales.each(lambda x: x if x.dtype == np.int8 else x * factor))


def stored(folder: Path, kinds: Kinds) -> tuple[LoadedModel, dict[str, np.ndarray]]:
    """A model some of whose weights are in few bits, and what these stand for."""
    loaded = load_model(folder, folder.name, "auto", "none")
    few: dict[int, Quantized] = {}
    wide = {}
    for name, parameter in loaded.model.named_parameters():
        for end, kind in kinds.items():
            if name.endswith(end):
                few[id(parameter)] = made = quantized(loaded.read(parameter), kind)  # type: ignore[arg-type]
                wide[name] = made.weight()

    def read(parameter: nn.Parameter, rows: slice = ALL) -> Weight:
        return few[id(parameter)].rows(rows) if id(parameter) in few else loaded.read(parameter, rows)

    return replace(loaded, read=read), wide


def logits(loaded: LoadedModel, *, exact: bool) -> tuple[np.ndarray, Any]:
    """Of the last row of a prompt, and the decoder. Unless they are exact, all builds give the interpreter's bits."""
    forward = prepare(loaded, None, CPU, batch_size=2, kv_memory=8 << 20).runners[0]
    forward.cache.pages.lay_out(2, 128)
    window = [Window(0, 0, PROMPT, 1)]
    if exact:
        with forward.decoder.exactly():
            return forward.run(window).copy(), forward.decoder
    with comparing() as passes:
        found = forward.run(window).copy()
    assert passes
    return found, forward.decoder


def of_transformers(folder: Path, wide: dict[str, np.ndarray]) -> np.ndarray:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in wide.items():
        model.get_parameter(name).data.copy_(tensor(weight))
    with torch.no_grad():
        return array(model(torch.tensor([PROMPT])).logits[0, -1:])


def near(found: np.ndarray, want: np.ndarray, most: float) -> bool:
    return bool(np.linalg.norm(found - want) < most * np.linalg.norm(want))


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        ({"q_proj.weight": Q4_K, "k_proj.weight": Q4_K, "v_proj.weight": Q6_K}, [(0, 384), (384, 128)]),
        ({"q_proj.weight": Q8_0, "v_proj.weight": Q8_0}, [(0, 256), (256, 128), (384, 128)]),
        ({"v_proj.weight": Q6_K}, [(0, 384), (384, 128)]),
    ],
)
def test_queries_keys_and_values_of_several_kinds(
    random_model: Callable[..., Path], kinds: Kinds, parts: list[tuple[int, int]]
) -> None:
    """Each kind keeps its own bits, and all builds those of the interpreter."""
    config = hf.Qwen2Config(**SIZES | {"vocab_size": 4096})  # whose layers have biases
    folder = random_model(config)
    loaded, wide = stored(folder, kinds)
    found, decoder = logits(loaded, exact=False)
    made = [s for s in decoder.program().steps if isinstance(s, Linear) and ".0.self_attn.qkv_proj" in s.name]
    assert [(s.at, s.weight.outputs) for s in made] == parts
    assert {s.weight.storage for s in made} - {Storage.FLOAT} == {kind[0] for kind in kinds.values()}
    want = of_transformers(folder, wide)
    assert near(found, want, 0.03)
    assert near(logits(stored(folder, kinds)[0], exact=True)[0], want, 1e-5)


@pytest.mark.parametrize("kind", [Q4_K, Q6_K, Q8_0], ids=str)
def test_a_tied_embedding_is_the_output_layer(random_model: Callable[..., Path], kind: InFewBits) -> None:
    """In the same memory, in its own bits."""
    folder = random_model(hf.LlamaConfig(**SIZES, tie_word_embeddings=True))
    loaded, wide = stored(folder, {"embed_tokens.weight": kind})
    found, decoder = logits(loaded, exact=False)
    first, *_, last = decoder.program().steps
    assert isinstance(first, EmbedColumn)
    assert isinstance(last, Linear)
    assert first.weight.storage == kind[0]
    assert address(first.weight.data) == address(last.weight.data)
    assert near(found, want := of_transformers(folder, wide), 0.05)
    assert near(logits(stored(folder, {"embed_tokens.weight": kind})[0], exact=True)[0], want, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "small", "step"),
    [("float32", 2.0**-90, EmbedColumn), ("bfloat16", 2.0**-54, EmbedColumn), ("bfloat16", 2.0**-90, Embed)],
)
def test_a_tied_embedding_in_floats(
    random_model: Callable[..., Path], dtype: DTypeName, small: float, step: type[Step]
) -> None:
    """In the memory of the output layer, too, unless that has zeros for numbers that are too small for its products."""
    folder = random_model(hf.LlamaConfig(**SIZES, tie_word_embeddings=True))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][PROMPT[-1], 5] = small
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, decoder = logits(load_model(folder, folder.name, dtype, "none"), exact=False)
    first, *_, last = decoder.program().steps
    assert type(first) is step
    if isinstance(first, EmbedColumn):
        assert address(first.weight.data) == address(last.weight.data)


@pytest.mark.parametrize(
    ("kind", "step"), [(Q4_K, EmbedColumn), (Q6_K, EmbedColumn), ((Storage.CODE, Storage.FLOAT, GROUP, False), Embed)]
)
def test_an_embedding_in_few_bits(random_model: Callable[..., Path], kind: InFewBits, step: type[Step]) -> None:
    """Beside an output layer of another kind, and a factor of embeddings; codes are widened."""
    kinds = {"embed_tokens.weight": kind, "lm_head.weight": Q8_0}
    folder = random_model(hf.GraniteConfig(**SIZES, embedding_multiplier=3.0, tie_word_embeddings=False))
    loaded, wide = stored(folder, kinds)
    found, decoder = logits(loaded, exact=False)
    first, *_, last = decoder.program().steps
    assert type(first) is step
    assert last.weight.storage == Storage.BYTE
    assert near(found, want := of_transformers(folder, wide), 0.03)
    assert near(logits(stored(folder, kinds)[0], exact=True)[0], want, 1e-5)
