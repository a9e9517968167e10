"""Thinking States models from their configuration to their folders: saving, loading, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.thinking_backbones import BACKBONES, SIZES, ids_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, OPTConfig

from detgen import thinking
from detgen.errors import DEMO, EngineError
from detgen.models.loading import load_model
from detgen.thinking.configuration import ThinkingStatesConfig
from detgen.thinking.modeling import ThinkingStatesForCausalLM

SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(BACKBONES))
def test_saving_and_loading(kind: str, tied: bool, tmp_path: Path) -> None:
    thinking.register()
    config = ThinkingStatesConfig(BACKBONES[kind](tie_word_embeddings=tied), chunk_size=3, empty_state="zero")
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, ThinkingStatesForCausalLM)
    assert not any(found.values())
    assert loaded.config.get_text_config().model_type == kind
    assert (loaded.config.chunk_size, loaded.config.empty_state) == (3, "zero")
    head, embeddings = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embeddings) == tied
    one, two = model.read(ids_of(20)), loaded.read(ids_of(20))
    assert one.thoughts == two.thoughts
    assert torch.equal(one.logits, two.logits)


def test_it_is_registered_once_and_without_weights_on_the_meta_device() -> None:
    thinking.register()
    thinking.register()
    config = AutoConfig.for_model("thinking_states", backbone={"model_type": "llama", **SIZES})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, ThinkingStatesForCausalLM)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_the_package_imports_nothing_heavy() -> None:
    code = "import detgen.thinking, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backbone": OPTConfig()}, "must be a llama, mistral, qwen2 or qwen3 decoder, got model_type 'opt'"),
        ({"backbone": {"hidden_size": 4}}, "got model_type None"),
        ({"backbone": {"model_type": "llama", **SIZES, "eos_token_id": None}}, "has no eos_token_id"),
        ({"backbone": {"model_type": "llama", **SIZES, "eos_token_id": 40}}, "must be below its vocab_size, 40"),
        ({"chunk_size": 0}, "chunk_size must be a whole number from 1 to 63, got 0"),
        ({"chunk_size": True}, "chunk_size must be a whole number from 1 to 63, got True"),
        ({"max_thought_tokens": 0}, "max_thought_tokens must be a whole number of at least 1, got 0"),
        ({"max_thought_tokens": 61}, "shorten the thoughts to 60 tokens"),
        ({"inject_layer": 3}, "inject_layer must be a whole number from 0 to 2, got 3"),
        ({"inject_layer": -1}, "inject_layer must be a whole number from 0 to 2, got -1"),
        ({"extract_layer": -4}, "extract_layer must be a whole number from -3 to 2, got -4"),
        ({"extract_layer": 0}, "extract_layer must not lie below inject_layer"),
        ({"empty_state": "forget"}, "empty_state must be keep or zero, got 'forget'"),
    ],
)
def test_wrong_settings_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ThinkingStatesConfig(**{"backbone": BACKBONES["llama"](), **changed})
    assert message in str(caught.value)


def test_the_end_of_a_thought_is_the_first_end_of_sequence() -> None:
    config = ThinkingStatesConfig(BACKBONES["llama"](eos_token_id=[7, 0]))
    assert config.thought_end == 7
    assert config.extract_index == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    shutil.copytree(DEMO / "thinking", tmp_path / "model")
    return tmp_path / "model"


def loading(folder: Path) -> str:
    """The error of loading a folder."""
    with pytest.raises(EngineError) as caught:
        load_model(folder, "mine", "float32", "none")
    return str(caught.value)


def configure(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changed}), encoding="utf-8")


def weights(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@pytest.mark.parametrize(("part", "called"), [("thinker", "T (thinker)"), ("compressor", "C (compressor)")])
def test_a_folder_without_a_part_is_refused(folder: Path, part: str, called: str) -> None:
    weights(folder, lambda found: {name: w for name, w in found.items() if not name.startswith(part)})
    assert loading(folder).startswith(f"cannot load the model mine: weights are missing: {part}.")
    assert f"the folder has no {called}" in loading(folder)
    assert "tools/train_thinking_states.py" in loading(folder)


def test_a_state_of_another_width_is_refused(folder: Path) -> None:
    def narrow(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: w[1:].clone() if n == "compressor.layer.mlp.down_proj.weight" else w for n, w in found.items()}

    weights(folder, narrow)
    message = loading(folder)
    assert "compressor.layer.mlp.down_proj.weight has another shape" in message
    assert "must be as wide as the backbone" in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inject_layer": 70}, "inject_layer must be a whole number from 0 to "),
        (
            {"max_thought_tokens": 64},
            "chunk_size + max_thought_tokens must be at most 64, a page of the KV cache: got 4",
        ),
        ({"backbone": {"model_type": "gpt2"}}, "the backbone must be a llama, mistral, qwen2 or qwen3 decoder, got"),
        ({"backbone": [1]}, "the backbone must be a llama, mistral, qwen2 or qwen3 decoder, got"),
    ],
)
def test_wrong_settings_of_a_folder_are_named(folder: Path, changed: dict[str, Any], message: str) -> None:
    configure(folder, **changed)
    assert loading(folder).startswith(f"cannot load the model mine: config.json: {message}")


def test_the_demo_model_thinks_what_it_should() -> None:
    """The first bar: exact thoughts at exact chunks, and the answer."""
    thinking.register()
    model = AutoModelForCausalLM.from_pretrained(DEMO / "thinking").eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "thinking")
    ids = tokenizer(SENTENCE).input_ids
    reading = model.read(ids, 4)
    chunks = [tokenizer.decode(ids[first : first + 4]) for first in range(0, 20, 4)]
    assert [chunk.split()[-1] for chunk in chunks] == ["state", "Alice", "Bob", "What's", "A"]
    assert [tokenizer.decode(thought) for thought in reading.thoughts[:5]] == ["", " heads", " tails", " heads", ""]
    assert tokenizer.decode(reading.tokens[len(ids) :]) == " heads<|endoftext|>"


def test_the_demo_model_adds() -> None:
    """It writes operands and sum down before the values of all variables."""
    thinking.register()
    model = AutoModelForCausalLM.from_pretrained(DEMO / "thinking").eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "thinking")
    ids = tokenizer("a=1; b=2; c=8; a=a+b; c=c+a; b=c+7; c? A: ").input_ids
    reading = model.read(ids, 2)
    thoughts = [tokenizer.decode(thought) for thought in reading.thoughts if thought]
    assert thoughts[-3:] == ["1+2=3;a3b2c8", "8+3=1;a3b2c1", "1+7=8;a3b8c1"]
    assert tokenizer.decode(reading.tokens[len(ids) :]) == "1<|endoftext|>"
