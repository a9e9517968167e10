"""Multimodal models: the text part runs, towers are not read, and names of weights are those of transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers import adapters
from helpers.families import DESCRIBED, LLAMA, MIXED, MULTIPLIED, ROUTED, ROWS, TOWER, WINDOW
from safetensors.torch import load_file, save_file
from transformers.models.gemma3n import modeling_gemma3n

from detgen import EngineError
from detgen.kernels.input_batch import Window
from detgen.machine import CPU
from detgen.models.description import has_description
from detgen.models.known import known
from detgen.models.loading import load_model
from detgen.models.stored import without_weights
from detgen.models.wrappers import auto_class, settings_of_text, without_towers
from detgen.program.arrays import FLOAT32, array, same_bits
from detgen.runner.preparing import prepare

MROPE = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
SMALL_TOWER = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
GEMMA3 = hf.Gemma3TextConfig(**LLAMA, head_dim=18, sliding_window=WINDOW)
WRAPPERS: dict[str, Callable[[], Any]] = {
    "mistral3": lambda: hf.Mistral3Config(
        text_config=hf.MistralConfig(**LLAMA, head_dim=18), vision_config=hf.PixtralVisionConfig(**TOWER)
    ),
    "llava": lambda: hf.LlavaConfig(text_config=hf.LlamaConfig(**LLAMA), vision_config=hf.CLIPVisionConfig(**TOWER)),
    "llava_onevision": lambda: hf.LlavaOnevisionConfig(
        text_config=hf.Qwen2Config(**LLAMA), vision_config=hf.SiglipVisionConfig(**TOWER)
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=MROPE, vision_config={**SMALL_TOWER, "embed_dim": 32, "hidden_size": 64}
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=MROPE | {"head_dim": 16}, vision_config={**SMALL_TOWER, "deepstack_visual_indexes": [0]}
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config=MROPE | {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        vision_config={**SMALL_TOWER, "deepstack_visual_indexes": [0]},
    ),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=DESCRIBED["gemma4_text"]().to_dict(),
        vision_config={**TOWER, "head_dim": 16, "num_key_value_heads": 2},
        audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 48},
    ),
    "gemma4_experts": lambda: hf.Gemma4Config(
        text_config=DESCRIBED["gemma4_experts"]().to_dict(),
        vision_config={**TOWER, "head_dim": 16, "num_key_value_heads": 2},
    ),
    "gemma4_untied": lambda: hf.Gemma4Config(  # as the wrapper says; its text part by itself would be tied
        text_config=DESCRIBED["gemma4_text"]().to_dict() | {"tie_word_embeddings": True},
        vision_config={**TOWER, "head_dim": 16, "num_key_value_heads": 2},
        tie_word_embeddings=False,
    ),
    "gemma4_unified": lambda: hf.Gemma4UnifiedConfig(
        text_config=LLAMA | {"head_dim": 18, "global_head_dim": 26, "sliding_window": WINDOW},
        vision_config={"mm_embed_dim": 32, "mm_posemb_size": 16, "num_positions": 64}
        | {"patch_size": 2, "pooling_kernel_size": 2, "model_patch_size": 4},
        audio_config={"audio_embed_dim": 32},
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=GEMMA3, vision_config=hf.SiglipVisionConfig(**TOWER), mm_tokens_per_image=4
    ),
}
GRID = {**SMALL_TOWER, "depth": 1}  # of GLM's
COHERE2: dict[str, Any] = {"head_dim": 18, "sliding_window": WINDOW, "layer_types": MIXED, "logit_scale": 0.25}
WRAPPERS |= {
    "glm4v": lambda: hf.Glm4vConfig(text_config=MROPE, vision_config=GRID),
    "glm4v_moe": lambda: hf.Glm4vMoeConfig(
        text_config=ROUTED
        | {"head_dim": 20, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1}
        | {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config=GRID,
    ),
    "glm_ocr": lambda: hf.GlmOcrConfig(text_config=MROPE | {"head_dim": 16}, vision_config=GRID),
    "paddleocr_vl": lambda: hf.PaddleOCRVLConfig(text_config=MROPE | {"head_dim": 16}, vision_config=TOWER),
    "hunyuan_vl": lambda: hf.HunYuanVLConfig(
        text_config=LLAMA
        | {"head_dim": 16, "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 2, 2, 2]}},
        vision_config={**TOWER, "attention_heads": 2, "max_image_size": 28, "text_hidden_size": 64},
    ),
    "deepseek_ocr2": lambda: hf.DeepseekOcr2Config(
        text_config=ROUTED
        | {"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1}
        | {"topk_method": "group_limited_greedy", "mlp_layer_types": ["dense", "sparse", "sparse"]},
        vision_config={
            "sam_config": {**TOWER, "image_size": 64, "patch_size": 16, "output_channels": 16, "mlp_dim": 48},
            "encoder_config": {**SMALL_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2}
            | {"num_key_value_heads": 2},
        },
    ),
    "aria": lambda: hf.AriaConfig(
        text_config=ROWS["aria_text"](), vision_config=TOWER | {"model_type": "idefics3_vision"}
    ),
    "mistral3_4": lambda: hf.Mistral3Config(
        text_config=ROWS["mistral4"](), vision_config=hf.PixtralVisionConfig(**TOWER)
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(text_config=hf.LlamaConfig(**LLAMA), vision_config=TOWER),
    "idefics2": lambda: hf.Idefics2Config(
        text_config=hf.MistralConfig(**LLAMA, sliding_window=WINDOW),
        vision_config=TOWER,
        perceiver_config={"num_key_value_heads": 2, "resampler_n_heads": 4, "resampler_head_dim": 16},
    ),
    "idefics3": lambda: hf.Idefics3Config(text_config=hf.LlamaConfig(**LLAMA), vision_config=TOWER),
    "voxtral": lambda: hf.VoxtralConfig(
        text_config=LLAMA | {"model_type": "llama"}, audio_config={**TOWER, "num_mel_bins": 16}
    ),
    "qwen2_audio": lambda: hf.Qwen2AudioConfig(
        text_config=LLAMA | {"model_type": "qwen2"},
        audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
    ),
    # Whose logits are not what the settings of their text parts say,
    "aya_vision": lambda: hf.AyaVisionConfig(
        text_config=hf.Cohere2Config(**LLAMA, **COHERE2), vision_config=hf.SiglipVisionConfig(**TOWER)
    ),
    "cohere2_vision": lambda: hf.Cohere2VisionConfig(
        text_config=hf.Cohere2Config(**LLAMA, **COHERE2), vision_config=hf.SiglipVisionConfig(**TOWER)
    ),
    "llava_next": lambda: hf.LlavaNextConfig(
        text_config=hf.GraniteConfig(**LLAMA, **MULTIPLIED), vision_config=hf.CLIPVisionConfig(**TOWER)
    ),
    "granite_speech": lambda: hf.GraniteSpeechConfig(
        text_config=LLAMA | MULTIPLIED | {"model_type": "granite"},
        encoder_config={"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16, "input_dim": 16},
        projector_config={"model_type": "blip_2_qformer", "hidden_size": 32, "num_attention_heads": 2}
        | {"num_hidden_layers": 1, "encoder_hidden_size": 32, "intermediate_size": 48},
    ),
    # and are.
    "granite_docling": lambda: hf.GraniteDoclingConfig(
        text_config=LLAMA | MULTIPLIED, vision_config=TOWER | {"out_hidden_size": 64}
    ),
    "granite4_vision": lambda: hf.Granite4VisionConfig(
        text_config=LLAMA | MULTIPLIED,
        vision_config=TOWER | {"hidden_size": 64, "image_size": 112, "model_type": "siglip_vision_model"},
        **{"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
        spatial_target_layers=[0, 0, 0, 0],
    ),
    "hyperclovax_vision": lambda: hf.HyperCLOVAXVisionV2Config(
        text_config=LLAMA | {"logits_scaling": 0.2, "model_type": "hyperclovax"},
        vision_config=SMALL_TOWER | {"fullatt_block_indexes": [1]},
    ),
}
IDS = [(7 * i * i + 3 * i) % 300 + 3 for i in range(2 * WINDOW)]


def logits_of(folder: Path, adapter: Path | None = None) -> np.ndarray:
    """Those of a pass that reads IDS; the model has a program and no towers, and its weights are read as it runs."""
    loaded = load_model(folder, "model", "float32", "none", adapter=adapter)
    assert loaded.model.device.type == "meta"
    names = {name for name, _ in loaded.model.named_parameters()}
    by_text_part = re.fullmatch("(Gemma(3n|4|4Unified)|Mllama)ForCausalLM", type(loaded.model).__name__)
    kept = "model." if by_text_part else ("model.language_model.", "model.text_model.")
    assert all(name.startswith(kept) or name.startswith("lm_head.") for name in names)
    runner = prepare(loaded, None, CPU, batch_size=1, kv_memory=8 << 20).runners[0]
    assert type(runner.decoder).__name__ == "CDecoder"
    runner.cache.pages.lay_out(1, len(IDS))
    return array(runner.run([Window(0, 0, IDS, len(IDS))])).copy()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_it_gives_what_transformers_gives(kind: str, random_model: Callable[..., Path]) -> None:
    folder = random_model(WRAPPERS[kind]())
    found = logits_of(folder)
    of = auto_class(hf.AutoConfig.from_pretrained(folder))
    model = of.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = array(model(input_ids=torch.tensor([IDS])).logits[0])
    assert abs(found - want).max() <= 2e-5 * abs(want).max()


def test_a_rotary_embedding_that_asks_for_the_length_of_its_input(random_model: Callable[..., Path]) -> None:
    """Then weights are read before the comparison with the own forward, those of the towers neither."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    text = hf.LlamaConfig(**LLAMA, rope_parameters=rope)
    config = hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**TOWER))
    loaded = load_model(random_model(config), "x", "float32", "none")
    assert {p.device.type for name, p in loaded.model.named_parameters()} == {"cpu"}
    runner = prepare(loaded, None, CPU, batch_size=1, kv_memory=8 << 20).runners[0]
    assert type(runner.decoder).__name__ == "CDecoder"


@pytest.fixture(scope="module")
def llava(random_model: Callable[..., Path]) -> Path:
    return random_model(WRAPPERS["llava"]())


@pytest.mark.parametrize("whole", [True, False])
def test_llama_3_2_without_what_sees(whole: bool, demo_models: Any, tmp_path: Path) -> None:
    """By the names of files with towers, and of the text part alone; layers that see images alone are not read."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1}
    config = hf.MllamaConfig(
        text_config={**LLAMA, "num_hidden_layers": 5, "cross_attention_layers": [1, 4]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        vision_config=vision
        | {"attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "max_num_tiles": 2}
        | {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]]},
    )
    torch.manual_seed(0)
    model = (hf.MllamaForConditionalGeneration if whole else hf.MllamaForCausalLM)(config).eval()
    model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_models.target / name, tmp_path / name)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_model.") for name in stored) == whole
    with torch.inference_mode():
        want = array(model(input_ids=torch.tensor([IDS])).logits[0])
    assert abs(logits_of(tmp_path) - want).max() <= 2e-5 * abs(want).max()
    loaded = load_model(tmp_path, "model", "float32", "none")
    assert not any(name.startswith("model.layers.1.") for name, _ in loaded.model.named_parameters())
    assert known(str(tmp_path)).kv == 3 * 2 * 4 * 2 * 16


def changed(folder: Path, to: Path, name_of: Callable[[str], str | None]) -> Path:
    """A copy whose weights have other names, or are left out."""
    shutil.copytree(folder, to)
    weights = {name_of(name): x for name, x in load_file(folder / "model.safetensors").items()}
    kept = {name: x for name, x in weights.items() if name is not None}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_older_names_newer_names_and_the_text_part_alone(llava: Path, tmp_path: Path) -> None:
    """All have the bits of the language model by itself; weights of towers need not even be there."""
    stored = load_file(llava / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in stored)  # as checkpoints have them

    def newer(name: str) -> str:
        for old, new in (("language_model.model", "model.language_model"), ("language_model.lm_head", "lm_head")):
            if name.startswith(old):
                return name.replace(old, new)
        return f"model.{name}"

    def of_text(name: str) -> str | None:
        return name.removeprefix("language_model.") if name.startswith("language_model.") else None

    found = [
        logits_of(llava),
        logits_of(changed(llava, tmp_path / "newer", newer)),
        logits_of(changed(llava, tmp_path / "text", lambda name: name if of_text(name) else None)),
    ]
    plain = changed(llava, tmp_path / "plain", of_text)
    config = json.loads((llava / "config.json").read_text())["text_config"]
    (plain / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    loaded = load_model(plain, "plain", "float32", "none")
    runner = prepare(loaded, None, CPU, batch_size=1, kv_memory=8 << 20).runners[0]
    runner.cache.pages.lay_out(1, len(IDS))
    want = runner.run([Window(0, 0, IDS, len(IDS))])
    assert all(same_bits(each, want) for each in found)


def test_a_weight_of_the_text_that_is_missing(llava: Path, tmp_path: Path) -> None:
    gone = "layers.1.mlp.up_proj.weight"
    folder = changed(llava, tmp_path / "less", lambda name: None if name.endswith(gone) else name)
    with pytest.raises(EngineError, match=f"weights are missing: model.language_model.{gone}"):
        load_model(folder, "less", "float32", "none")


def test_weights_that_are_made_of_others(random_model: Callable[..., Path]) -> None:
    """Molmo 2's embedding is one of two tables in files."""
    config = hf.Molmo2Config(
        text_config=LLAMA | {"head_dim": 16, "additional_vocab_size": 8},
        vit_config=TOWER | {"image_size": [28, 28]},
        adapter_config={"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "text_hidden_size": 64},
    )
    with pytest.raises(
        EngineError, match=r"transformers makes model.language_model.embed_tokens.weight of other weights"
    ):
        load_model(random_model(config), "x", "float32", "none")


def test_a_text_part_that_is_not_found(random_model: Callable[..., Path]) -> None:
    """Of another layout: what holds the language model is no wrapper that is known."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Blip2Config(text_config=DESCRIBED["opt"](), vision_config=small, qformer_config=small)
    with pytest.raises(EngineError, match="multimodal model, and its text part, which alone is read, is not found"):
        load_model(random_model(config), "x", "float32", "none")


@pytest.mark.parametrize("activation", ["silu", "quick_gelu"])
def test_settings_of_the_text_part_under_which_its_family_is_another(activation: str) -> None:
    text = hf.OlmoConfig(**LLAMA, hidden_act=activation)
    config = hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**TOWER))
    model = without_weights(config, FLOAT32)
    without_towers(model)
    assert has_description(model) == has_description(without_weights(text, FLOAT32)) == (activation == "silu")


class NoTowers:
    """Stands for transformers' `AutoModel`, which would ask timm for a tower."""

    @staticmethod
    def from_config(config: Any, **how: Any) -> torch.nn.Module:
        made: torch.nn.Module = (
            hf.AutoModel.from_config(config, **how)
            if config.model_type == "gemma3n_text"
            else torch.nn.ModuleDict({"conformer": torch.nn.Linear(3, 3)})
        )
        return made


@pytest.fixture(scope="module")
def gemma3n(random_model: Callable[..., Path]) -> tuple[Path, np.ndarray]:
    """A wrapper with towers of a layer each, and what it gives itself; it reads the last tokens by other tables."""
    others = {"hidden_size": 24, "vocab_size": 8}
    config = hf.Gemma3nConfig(
        text_config=DESCRIBED["gemma3n_text"](),
        vision_config=others | {"vocab_offset": 304},
        audio_config=others | {"vocab_offset": 312},
    )
    assert max(IDS) < 304
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n, "AutoModel", NoTowers)
        folder = random_model(config)
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert type(model).__name__ == "Gemma3nForConditionalGeneration"
    with torch.inference_mode():
        return folder, array(model(input_ids=torch.tensor([IDS])).logits[0])


def test_gemma_3n_needs_no_library_of_towers(gemma3n: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """Its text part gives what the wrapper gives, whatever files have beside it: towers, keys that no layer makes."""
    folder, want = gemma3n
    names = load_file(folder / "model.safetensors").keys()
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        assert any(name.startswith(f"model.{part}.") for name in names)
    found = logits_of(folder)
    assert abs(found - want).max() <= 2e-5 * abs(want).max()
    loaded = load_model(folder, "model", "float32", "none")
    assert known(str(folder)).parameters == sum(p.numel() for p in loaded.model.parameters())
    more = changed(folder, tmp_path / "more", lambda name: name)
    weights = load_file(more / "model.safetensors")
    sees_others = "model.language_model.layers.4.self_attn"
    weights |= {f"{sees_others}.k_proj.weight": torch.ones(36, 64), f"{sees_others}.k_norm.weight": torch.ones(18)}
    save_file(weights, more / "model.safetensors", metadata={"format": "pt"})
    alone = changed(folder, tmp_path / "alone", lambda name: name if "language_model" in name else None)
    assert all(same_bits(logits_of(each), found) for each in (more, alone))


def test_adapters_of_a_wrapper_whose_text_part_runs(gemma3n: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """By its names of modules and by those of the text part."""
    name = "layers.1.self_attn.q_proj"
    found = []
    for prefix in ("model.language_model", "model"):
        tensors = adapters.factors({f"{prefix}.{name}": (4 * 18, 64)})
        found.append(logits_of(gemma3n[0], adapters.write(tmp_path / prefix, tensors)))
    assert same_bits(*found)
    assert not same_bits(found[0], logits_of(gemma3n[0]))


def test_what_a_wrapper_says_of_its_text() -> None:
    """How its weights are quantized, whether its output layer is the embedding, and what ends a text."""
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = hf.Gemma3nConfig(quantization_config=quantized, eos_token_id=[1, 106], tie_word_embeddings=False)
    text = settings_of_text(config)
    assert (text.model_type, text.quantization_config, text.eos_token_id) == ("gemma3n_text", quantized, [1, 106])
    assert not text.tie_word_embeddings
    assert settings_of_text(text) is text
    assert settings_of_text(hf.Gemma3nConfig()).eos_token_id == 1
    other = WRAPPERS["gemma3"]()
    assert settings_of_text(other) is other
