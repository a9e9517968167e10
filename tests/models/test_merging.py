"""Adapters: merged by PEFT's rule, in the stated order, before quantizing, and refused where they do not fit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import adapters
from helpers.examples import usual
from helpers.threads import using
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, GPT2Config, LlamaConfig

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.engine import model_pair
from detgen.kernels.c.library import CHOICE
from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model
from detgen.models.stored import whole
from detgen.program.arithmetic import linear, number
from detgen.program.arrays import array, floats, same_bits, tensor

ATTENTION = "model.layers.0.self_attn"
LLAMA = {
    f"{ATTENTION}.q_proj": (64, 64),
    f"{ATTENTION}.v_proj": (32, 64),
    "model.layers.1.mlp.down_proj": (64, 96),
}


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model(
        LlamaConfig(
            **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
            tie_word_embeddings=False,
        )
    )


def load(folder: Path, adapter: Path | None, dtype: Any = "auto", quant: Any = "none") -> LoadedModel:
    return load_model(folder, "model", dtype, quant, adapter=adapter)


def weight_of(loaded: LoadedModel, name: str, rows: slice = slice(None)) -> np.ndarray:
    return whole(loaded.read(loaded.model.get_parameter(name), rows))


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (2, 2, 2)),
        ({"use_rslora": True}, (4, 4, 4)),
        ({"alpha_pattern": {"v_proj": 3}, "target_modules": ["q_proj", "v_proj", "mlp.down_proj"]}, (2, 0.75, 2)),
        ({"r": 9, "rank_pattern": {r"layers\.\d+\.self_attn\..*": 4, "down_proj": 4}}, (2, 2, 2)),
        ({"alpha_pattern": {"^model.layers.1.mlp.down_proj": 1, "proj": 5}, "lora_alpha": 4}, (1, 1, 0.25)),
    ],
)
def test_weights_are_those_of_pefts_rule(
    llama: Path, tmp_path: Path, settings: dict[str, Any], scales: tuple[float, ...]
) -> None:
    """W + scale * B @ A within the rounding of float32; all others as they were."""
    tensors = adapters.factors(LLAMA)
    plain, loaded = load(llama, None), load(llama, adapters.write(tmp_path / "a", tensors, **settings))
    assert loaded.adapter is not None
    assert loaded.digest == plain.digest
    found = dict(zip(LLAMA, scales, strict=True))
    for name, _ in plain.model.named_parameters():
        was, now = weight_of(plain, name), weight_of(loaded, name)
        scale = found.get(name.removesuffix(".weight"))
        if scale is None:
            assert same_bits(was, now)
            continue
        want = adapters.merged(was, tensors, name.removesuffix(".weight"), scale)
        assert abs(now - want).max() < 1e-6 * abs(want).max()
        assert abs(now - was).max() > 1e-3


def test_the_order_of_sums_is_the_stated_one(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever rows are read, by one thread and two, by every build, in each number format."""
    rank, name = 150, f"{ATTENTION}.q_proj"  # more than a part
    tensors = adapters.factors(LLAMA, rank)
    folder = adapters.write(tmp_path / "a", tensors, r=rank, lora_alpha=7)
    up, down = (tensors[f"{adapters.PREFIX}{name}.lora_{part}.weight"] for part in "BA")
    change = array(linear(up, down) * number(7 / rank))
    for dtype in ("float32", "bfloat16", "float16"):
        was = weight_of(load(llama, None, dtype), f"{name}.weight")
        want = (floats(was) + change).astype(was.dtype)
        for build, threads in (("", 1), ("", 2), ("plain", 2)):
            monkeypatch.setenv(CHOICE, build)
            with using(threads):
                loaded = load(llama, folder, dtype)
                assert same_bits(weight_of(loaded, f"{name}.weight"), want)
                assert same_bits(weight_of(loaded, f"{name}.weight", slice(3, 10)), want[3:10])


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_other_layouts(random_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """GPT-2 has its weights the other way round; Bloom is loaded by transformers."""
    config, name, shape = {
        "gpt2": (GPT2Config(vocab_size=4096, n_embd=64, n_layer=1, n_head=2), "transformer.h.0.attn.c_attn", (192, 64)),
        "bloom": (
            BloomConfig(vocab_size=4096, hidden_size=64, n_layer=1, n_head=2),
            *("transformer.h.0.self_attention.query_key_value", (192, 64)),
        ),
    }[kind]
    folder, tensors = random_model(config), adapters.factors({name: shape})
    loaded = load(folder, adapters.write(tmp_path / "a", tensors, fan_in_fan_out=True))
    was = load(folder, None)
    want = adapters.merged(weight_of(was, f"{name}.weight"), tensors, name, 2, turned=kind == "gpt2")
    assert abs(weight_of(loaded, f"{name}.weight") - want).max() < 1e-6 * abs(want).max()


def saved(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a model with other weights in it."""
    shutil.copytree(folder, to)
    held = load_file(to / "model.safetensors")
    save_file({**held, **tensors}, to / "model.safetensors", metadata={"format": "pt"})
    return to


def generated(**settings: Any) -> list[Any]:
    """Texts, and bits of log-probabilities, of six requests."""
    engine = Engine(kv_memory=4 << 20, **settings)
    params = SamplingParams(max_tokens=12, logprobs=2, temperature=0.7)
    found = engine.generate([Request(prompt=f"text {i}: ", id=str(i), params=params) for i in range(6)])
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize("quant", usual(["none", "q4_k"], ["q8", "int8"]))
def test_a_run_is_that_of_the_model_merged_and_saved(llama: Path, tmp_path: Path, quant: Any) -> None:
    """Bit for bit, quantized after merging; whatever the batch, the drafter and the threads."""
    adapter = adapters.write(tmp_path / "a", adapters.factors(LLAMA))
    loaded = load(llama, adapter)
    copy = saved(llama, tmp_path / "m", {f"{n}.weight": tensor(weight_of(loaded, f"{n}.weight")) for n in LLAMA})
    want = generated(target=copy, target_quant=quant, drafter="none", batch_size=1)
    assert want != generated(target=llama, target_quant=quant, drafter="none", batch_size=1)
    for settings in (
        {"batch_size": 4, "drafter": "self" if quant == "none" else "auto", "threads": 1},
        {"drafter": "ngram"},
    ):
        assert generated(target=llama, adapter=adapter, target_quant=quant, **settings) == want


def test_what_is_kept_is_that_of_the_adapter(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without one, and with another one, is asked anew."""
    found: list[LoadedModel] = []

    def noting(*args: Any, **named: Any) -> LoadedModel:
        found.append(load_model(*args, **named))
        return found[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_pair, "load_model", noting)
    one, other = (adapters.write(tmp_path / str(seed), adapters.factors(LLAMA, seed=seed)) for seed in (1, 2))
    texts = {}
    for adapter, kept in ((None, False), (one, False), (other, False), (one, True), (None, True), (other, True)):
        text = generated(target=llama, adapter=adapter, drafter="none")
        assert texts.setdefault(adapter, text) == text
        assert (found[-1].own is not None) == kept
    assert found[-1].adapter != found[-3].adapter


def test_whole_weights_stand_for_the_models_own(llama: Path, tmp_path: Path) -> None:
    """modules_to_save, and the layer below factors that PEFT saves beside them."""
    g = torch.Generator().manual_seed(5)
    table, head = (torch.randn(4096, 64, generator=g) for _ in range(2))
    tensors = adapters.factors({"lm_head": (4096, 64)})
    own = {f"{adapters.PREFIX}model.embed_tokens.weight": table, f"{adapters.PREFIX}lm_head.base_layer.weight": head}
    loaded = load(llama, adapters.write(tmp_path / "a", tensors | own, modules_to_save=["embed_tokens"]))
    assert same_bits(weight_of(loaded, "model.embed_tokens.weight"), table)
    want = adapters.merged(head, tensors, "lm_head", 2)
    assert abs(weight_of(loaded, "lm_head.weight") - want).max() < 1e-6 * abs(want).max()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"model.layers.7.mlp.up_proj": (96, 64)}, "the model has no module model.layers.7.mlp.up_proj"),
        ({f"{ATTENTION}.q_proj": (64, 32)}, r"is for a weight of \(64, 32\), and the model's is \(64, 64\)"),
        ({"model.embed_tokens": (4096, 64)}, "is a Embedding, and only linear layers"),
        ({"model.norm": (64, 64)}, "is a LlamaRMSNorm, and only linear layers"),
    ],
)
def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path, shapes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        load(llama, adapters.write(tmp_path / "a", adapters.factors(shapes)))


def test_factors_that_are_not_finite_are_refused(llama: Path, tmp_path: Path) -> None:
    tensors = adapters.factors(LLAMA)
    tensors[f"{adapters.PREFIX}{ATTENTION}.v_proj.lora_B.weight"][3, 1] = math.nan
    with pytest.raises(EngineError, match=r"v_proj\.lora_B\.weight has numbers that are not finite"):
        Engine(target=llama, adapter=adapters.write(tmp_path / "a", tensors))


def test_the_profile_has_what_merged_weights_are_rounded_to(demo_models: Any, tmp_path: Path) -> None:
    """Of a checkpoint in bfloat16, also where it is kept; without an adapter, both ways give the same bits."""
    adapter = adapters.write(tmp_path / "a", adapters.factors({"model.layers.0.self_attn.q_proj": (256, 256)}))
    for dtype, rounded in (("auto", "bfloat16"), ("float32", "float32"), ("auto", "bfloat16")):
        target = Engine(target=demo_models.target, adapter=adapter, dtype=dtype, kv_memory=4 << 20).profile()["target"]
        assert target["adapter_dtype"] == rounded
    assert "adapter_dtype" not in Engine(target=demo_models.target, kv_memory=4 << 20).profile()["target"]


def test_a_weight_that_two_modules_share_is_not_changed(demo_models: Any, tmp_path: Path) -> None:
    """The output layer of the embedded model is its embedding."""
    adapter = adapters.write(tmp_path / "a", adapters.factors({"lm_head": (4096, 256)}))
    with pytest.raises(EngineError, match=r"would change model.embed_tokens.weight and lm_head.weight, which share"):
        load(demo_models.target, adapter)


def test_weights_that_are_quantized_already_are_not_merged(llama: Path, tmp_path: Path) -> None:
    adapter = adapters.write(tmp_path / "a", adapters.factors(LLAMA))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(EngineError, match=r"the weights of a GGUF file \(x.gguf\) stay as they are stored; give"):
        load(tmp_path / "x.gguf", adapter)
    copy = Path(shutil.copytree(llama, tmp_path / "m"))
    text = (copy / "config.json").read_text(encoding="utf-8").rstrip().removesuffix("}")
    held = load_file(copy / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    held["model.layers.0.mlp.up_proj.SCB"] = torch.ones(96)
    save_file(held, copy / "model.safetensors")
    added = ', "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
    (copy / "config.json").write_text(text + added, encoding="utf-8")
    with pytest.raises(EngineError, match="the weights of model are quantized already; give the model that they"):
        load(copy, adapter)


def test_a_loaded_model_takes_no_adapter(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="an adapter is merged while a model is loaded"):
        Engine(target=load(llama, None), adapter=tmp_path)


def test_scales(tmp_path: Path) -> None:
    """As a quotient of what adapter_config.json says, in float64."""
    from detgen.models.adapter_files import check_adapter

    folder = adapters.write(tmp_path / "a", adapters.factors(LLAMA, 3), r=3, lora_alpha=7, use_rslora=True)
    assert {f.scale for f in check_adapter(folder, None).factors.values()} == {7 / math.sqrt(3)}
