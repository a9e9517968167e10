"""Loading models: what goes together, what is refused, and what the digest sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.examples import usual
from helpers.families import OWN_FORWARD
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.machine import CPU
from detgen.models.fitting import check_vocabularies
from detgen.models.loading import load_model, pick_device
from detgen.models.settings import context_of
from detgen.program.arrays import BFLOAT16


@pytest.fixture(scope="module")
def small(random_model: Callable[..., Path]) -> Path:
    return random_model(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            eos_token_id=[0, 5],
        )
    )


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "model"))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_what_is_loaded(small: Path) -> None:
    """Evaluation mode, no gradients, the context, all end-of-sequence ids, and how weights are rounded."""
    loaded = load_model(small, "small", "auto", "none")
    assert loaded.name == "small"
    assert loaded.context == 256
    assert loaded.vocabulary == 4096
    assert loaded.eos == {0, 5}
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert load_model(small, "small", "bfloat16", "none").rounded == BFLOAT16


def test_the_embedded_models(demo_models: Any) -> None:
    """One vocabulary, small files."""
    target = load_model(demo_models.target, "target", "auto", "none")
    draft = load_model(demo_models.draft, "draft", "auto", "none")
    check_vocabularies(target, draft)
    assert target.vocabulary == draft.vocabulary == 4096
    assert target.tokenizer.chat_template
    assert (demo_models.target / "model.safetensors").stat().st_size <= 16e6
    assert (demo_models.draft / "model.safetensors").stat().st_size <= 3e6


def test_the_digest_sees_what_decides_an_output(copy: Path, small: Path) -> None:
    """One weight, one setting, one token or the template changes it; names of folders and notes do not."""

    def digest() -> str:
        return load_model(copy, "x", "auto", "none").digest

    seen = [load_model(small, "small", "auto", "none").digest]

    def changed() -> bool:
        seen.append(digest())
        return seen[-1] != seen[-2]

    assert not changed()
    (copy / "README.md").write_text("notes")
    assert not changed()

    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert changed()
    edit(copy / "config.json", lambda c: c.update(rms_norm_eps=1e-5))
    assert changed()
    edit(copy / "tokenizer.json", lambda c: c["model"].update(ignore_merges=True))
    assert changed()
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert changed()
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert changed()


def test_a_draft_of_another_vocabulary(copy: Path, small: Path) -> None:
    """The message says how many ids differ, names some, and what to do; nothing is generated."""

    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        a, b = (t for t, i in vocabulary.items() if i in (1000, 2000))
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]

    edit(copy / "tokenizer.json", swap)
    target = load_model(small, "target", "auto", "none")
    with pytest.raises(EngineError) as refusal:
        check_vocabularies(target, replace(load_model(copy, "draft", "auto", "none"), name="the-draft"))
    message = str(refusal.value)
    for part in ("the-draft", "target", "2 have other ids", "1000 and 2000", "2000 and 1000", "--drafter ngram"):
        assert part in message, message
    with pytest.raises(EngineError, match="does not share the vocabulary"):
        Engine(target=small, draft=copy, drafter="model", kv_memory=8 << 20)


def test_more_logits_than_tokens(random_model: Callable[..., Path], small: Path) -> None:
    """A draft model whose embedding is padded to more entries than the tokenizer has drafts valid ids only."""
    config = LlamaConfig(
        vocab_size=4160,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
    )
    engine = Engine(target=small, draft=random_model(config), drafter="model", draft_tokens=3, kv_memory=8 << 20)
    plain = Engine(target=small, drafter="none", kv_memory=8 << 20)
    prompts = ["def f(", "import os"]
    ours, theirs = (e.generate(prompts, max_tokens=12, temperature=1.0) for e in (engine, plain))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]


def test_folders_that_are_no_models(tmp_path: Path, copy: Path) -> None:
    """Unknown names, empty folders, broken settings and missing weights: named, with the reason."""
    with pytest.raises(EngineError, match=r"no/such/model.*not a name on the hub"):
        load_model("no/such/model", "no/such/model", "auto", "none")
    with pytest.raises(EngineError, match=r"no config\.json"):
        load_model(tmp_path, "empty", "auto", "none")
    (copy / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="cannot load the model broken"):
        load_model(copy, "broken", "auto", "none")
    (copy / "config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot load the model broken"):
        load_model(copy, "broken", "auto", "none")


def test_weights_cut_short(copy: Path) -> None:
    """A download that broke off is named, not a stack of library errors."""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineError, match="cannot load the model broken"):
        load_model(copy, "broken", "auto", "none")


def test_a_model_that_is_no_decoder(copy: Path) -> None:
    edit(copy / "config.json", lambda c: c.update(model_type="vit", architectures=["ViTModel"]))
    with pytest.raises(EngineError, match="cannot load the model picture"):
        load_model(copy, "picture", "auto", "none")


def test_devices() -> None:
    """Names that are no device, or none here."""
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(EngineError, match="no device named 'abacus'"):
        pick_device("abacus")
    with pytest.raises(EngineError, match="no device named 'meta'"):
        pick_device("meta")
    with pytest.raises(EngineError, match="CUDA"):
        pick_device("cuda:99")


def test_other_methods_of_quantizing_are_refused(copy: Path) -> None:
    edit(copy / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(EngineError, match="its weights are quantized by gptq, which is not supported"):
        load_model(copy, "copy", "auto", "none")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    usual(
        [("described", "bfloat16"), ("own forward", "float16")], [("described", "float16"), ("own forward", "bfloat16")]
    ),
)
def test_a_number_format_is_how_weights_are_kept(
    small: Path, random_model: Callable[..., Path], tmp_path: Path, dtype: Any, kind: str
) -> None:
    """On a CPU: the bits are those of a checkpoint that was rounded to it, and those of float32 are others.

    In bfloat16, the KV cache is in it as well, and layers of a description also round their inputs: only where that is
    asked for.
    """
    model = small if kind == "described" else random_model(OWN_FORWARD["nemotron"]())
    rounded = tmp_path / "rounded"
    shutil.copytree(model, rounded)
    tensors = {n: t.to(getattr(torch, dtype)) for n, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    request = Request(0, 0, token_ids=tuple(range(2, 30)), params=SamplingParams(max_tokens=4, logprobs=0))

    def bits(folder: Path, name: Any) -> tuple[Any, Any]:
        engine = Engine(target=folder, dtype=name, drafter="none", kv_memory=16 << 20)
        (found,) = engine.generate([request])
        return [record.logprob for record in found.records], engine.profile()["dtype"]

    assert str(load_model(model, "model", dtype, "none").rounded) == dtype
    kept, plain = bits(model, dtype), bits(model, "auto")
    exact, more = bits(rounded, "auto"), dtype == "bfloat16"
    assert exact == bits(rounded, "float32")
    assert (kept[0] == exact[0]) is not more
    assert kept == bits(rounded, dtype)
    assert kept[1] == dtype
    assert kept[0] != plain[0]
    assert plain[1] == "float32"


def test_rules_of_tensor_cores_are_for_models_with_a_description(random_model: Callable[..., Path]) -> None:
    with pytest.raises(EngineError, match="bfloat16-tc25 needs a model that runs whole"):
        load_model(random_model(OWN_FORWARD["nemotron"]()), "model", "bfloat16-tc25", "none")


def test_what_cannot_be_loaded(copy: Path) -> None:
    """Weights of another shape, no tokenizer, no folder: each is one message that names the remedy or the reason."""
    edit(copy / "config.json", lambda c: c.update(hidden_size=2 * c["hidden_size"]))
    with pytest.raises(EngineError, match="cannot load the model"):
        load_model(copy, "copy", "auto", "none")
    edit(copy / "config.json", lambda c: c.update(hidden_size=c["hidden_size"] // 2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        load_model(copy, "copy", "auto", "none")
    with pytest.raises(EngineError, match="no such folder"):
        load_model("./nowhere", "./nowhere", "auto", "none")


def test_context_of_stretched_rotary_embeddings(copy: Path) -> None:
    """Frequencies that depend on the longest neighbour of a pass: only the original context is used."""
    for kind in ("dynamic", "longrope", "linear"):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
        rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if kind == "longrope" else {}
        edit(copy / "config.json", lambda c, rope=rope: c.update(rope_parameters=rope))
        loaded = load_model(copy, "copy", "auto", "none")
        assert loaded.context == (256 if kind == "linear" else 64)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "max_target_positions"])
def test_context_by_what_a_configuration_calls_it(name: str) -> None:
    assert context_of(SimpleNamespace(**{name: 448})) == 448
    assert context_of(SimpleNamespace(**{name: None})) == 2048


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch was built for CUDA")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rope", "runs"),
    [
        ({"rope_type": "default", "rope_theta": 0}, False),
        ({"rope_type": "default", "rope_theta": -1e4}, False),
        ({"rope_type": "default", "rope_theta": 1e-20}, False),
        ({"rope_type": "default", "rope_theta": 1e300}, True),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}, False),
        (
            {"rope_type": "llama3", "rope_theta": 1e4, "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 64},
            False,
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e300, "original_max_position_embeddings": 64}, True),
    ],
)
def test_absurd_rotary_settings_are_refused_without_a_warning(copy: Path, rope: dict[str, Any], runs: bool) -> None:
    edit(copy / "config.json", lambda config: config.update(rope_parameters=rope))
    if runs:
        assert load_model(copy, "copy", "auto", "none").context
        return
    with pytest.raises(EngineError, match="copy: its rotary embedding has frequencies that are not finite, or too"):
        load_model(copy, "copy", "auto", "none")
