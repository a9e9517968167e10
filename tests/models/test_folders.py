"""Folders that strangers made: what is wrong is said before anything is loaded, and no code of theirs runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model_folders import ALL, BadFolder, edit
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from detgen import Engine
from detgen.cli import app
from detgen.errors import EngineError
from detgen.models.folders import check_folder
from detgen.models.loading import load_model

# One of each kind; the campaign tries all of them by the command line.
FEW = (
    *("code of the configuration", "code of the tokenizer", "a pickle in an archive", "a pickle of nothing"),
    *("weights in one place", "weights with a gap", "a weight twice", "a weight of whole numbers"),
    *("weights absent", "weights cut short", "weights of text", "a weight missing", "a weight of another shape"),
    *("a weight too many", "an index to elsewhere", "config.json list", "config.json latin-1", "config.json nested"),
    *("config.json a pipe", "config.json a loop", "tokenizer.json a device", "tokenizer.json of a tebibyte"),
    *("tokenizer_config.json list", "tokenizer.json nested", "no tokenizer", "an adapter"),
    *("hidden_size abc", "hidden_size 1048576", "num_hidden_layers -1", "num_hidden_layers 1000000000"),
    *("num_attention_heads 0", "num_attention_heads 3", "max_position_embeddings 1000000000000"),
    *("eos_token_id 'end'", "attention_bias True", "attn_implementation 'stranger/kernel'"),
    *(f"{file}eos_token_id {10**20 - 1}" for file in ("", "generation_config.json ")),
    *("query_pre_attn_scalar -1", "num_labels 1000000000", "decoder_layers 1000000000"),
    *("tokenizer_config.json model_max_length x", "quantization_config {'quant_method': 'bitsandbytes'}"),
)
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OurConfig(LlamaConfig):
    model_type = "ours"

class OurModel(LlamaForCausalLM):
    config_class = OurConfig
"""


@pytest.fixture
def folder(demo_models: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_models.draft, tmp_path / "model"))


@pytest.mark.parametrize("name", FEW)
def test_bad_folders(folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: BadFolder = next(case for case in ALL if case.name == name)
    case.damage(folder, tmp_path / "canary")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(EngineError) as refusal:
        load_model(folder, "bad", "auto", "none")
    assert case.said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "canary").exists()


def test_a_sliding_window_that_is_not_used(folder: Path) -> None:
    """transformers saves a Qwen2-MoE without one as having one of 0 positions."""
    edit(folder / "config.json", sliding_window=0, use_sliding_window=False)
    check_folder(folder, "good", trusted=False)
    edit(folder / "config.json", use_sliding_window=True)
    with pytest.raises(EngineError, match="sliding_window must be a whole number from 1"):
        check_folder(folder, "bad", trusted=False)


def test_tokens_that_the_model_does_not_have(folder: Path, tmp_path: Path) -> None:
    """An error of the prompts that have them; the others run."""
    next(case for case in ALL if case.name == "tokens beyond the vocabulary").damage(folder, tmp_path / "canary")
    engine = Engine(target=folder, drafter="none", kv_memory=8 << 20)
    beyond, within = engine.generate(["def f(", [5, 6]], max_tokens=2)
    assert "the tokenizer of " in str(beyond.error)
    assert "vocab_size is 4096" in str(beyond.error)
    assert within.error is None


def test_a_tokenizer_that_refuses_a_text(folder: Path, tmp_path: Path) -> None:
    """As another class of tokenizers does, which has no token for what it does not know."""
    next(case for case in ALL if case.name == "a BertTokenizer").damage(folder, tmp_path / "canary")
    engine = Engine(target=folder, drafter="none", kv_memory=8 << 20)
    refused, tokens = engine.generate(["hello there", [5, 6]], max_tokens=2)
    assert "fails on this text: WordPiece error: Missing [UNK] token" in str(refused.error)
    assert tokens.error is None


def test_a_folder_that_may_not_be_read(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / "config.json").chmod(0)
    with pytest.raises(EngineError, match=r"config\.json: it may not be read"):
        check_folder(folder, "bad", trusted=False)


def test_other_parts_of_a_checkpoint_are_left_out(folder: Path) -> None:
    """A checkpoint may have a tower that the decoder does not use; only weights within its layers must all be used."""
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.layers.0.weight"] = torch.zeros(3)
    tensors["vision_tower.position_ids"] = torch.arange(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder, "good", "auto", "none")


def test_a_weight_is_in_one_file(folder: Path) -> None:
    """Which of two would be taken depends on the reader."""
    path = folder / "model.safetensors"
    tensors, name = load_file(path), "model.norm.weight"
    path.rename(folder / "model-1.safetensors")
    save_file({name: tensors[name]}, folder / "model-2.safetensors", metadata={"format": "pt"})
    placed = dict.fromkeys(tensors, "model-1.safetensors") | {name: "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(EngineError, match=r'model-2.*has "model.norm.weight", which model-1.safetensors has, too'):
        check_folder(folder, "bad", trusted=False)


def test_more_memory_than_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"total": 2**20})()
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("psutil.swap_memory", lambda: memory)
    with pytest.raises(EngineError, match=r"parameters take 0\.0 GiB as bfloat16, and there are 0\.0 GiB of memory"):
        load_model(folder, "large", "auto", "none")


@pytest.fixture
def coded(folder: Path) -> Path:
    """The embedded model as one that needs code of its own, which computes the same."""
    (folder / "code.py").write_text(MODEL)
    names = {"AutoConfig": "code.OurConfig", "AutoModelForCausalLM": "code.OurModel"}
    edit(folder / "config.json", model_type="ours", architectures=["OurModel"], auto_map=names)
    return folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line, answered "y" to whatever it asks; what transformers keeps of a model's code is the test's."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f("}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda *arguments: CliRunner().invoke(app, arguments, input="y\n" * 100)


def test_code_runs_only_if_it_is_trusted(
    demo_models: Any, coded: Path, tmp_path: Path, command: Callable[..., Result]
) -> None:
    """Then it belongs to the digest; an audit must be told too, since no manifest can say so."""
    options = ("--drafter", "none", "--max-tokens", "4")
    refused = command("run", "prompts.jsonl", "--target", str(coded), *options)
    assert (refused.exit_code, "--trust-remote-code" in refused.stderr) == (2, True), refused.output
    done = command("run", "prompts.jsonl", "--target", str(coded), "--trust-remote-code", "-o", "ours", *options)
    assert done.exit_code == 0, done.output
    plain = command("run", "prompts.jsonl", "--target", str(demo_models.draft), "-o", "plain", *options)
    assert plain.exit_code == 0, plain.output
    assert (tmp_path / "ours/outputs.jsonl").read_bytes() == (tmp_path / "plain/outputs.jsonl").read_bytes()
    refused = command("audit", "ours")
    assert (refused.exit_code, "--trust-remote-code" in refused.stderr) == (2, True), refused.output
    assert command("audit", "ours", "--trust-remote-code").exit_code == 0
    (coded / "code.py").write_text(MODEL + "\n# changed\n")
    changed = command("audit", "ours", "--trust-remote-code")
    assert changed.exit_code == 1
    assert "the weights or the tokenizer are not those of the run" in changed.stdout


def test_code_of_another_repository_is_refused_even_then(coded: Path) -> None:
    edit(coded / "config.json", auto_map={"AutoConfig": "some/other--code.OurConfig"})
    with pytest.raises(EngineError, match="auto_map names code of another repository"):
        check_folder(coded, "bad", trusted=True)
