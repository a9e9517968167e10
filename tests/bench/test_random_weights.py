from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from detgen.bench.random_weights import CONFIGS, draft_settings, random_model, settings_of
from detgen.errors import BenchError


def parameters(settings: dict) -> int:
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("llama-3.1-8b", 8030.3), ("llama-3.2-1b", 1235.8), ("qwen3-0.6b", 596.0), ("llama-89m", 88.9)),
        *(("llama-29m", 29.4), ("llama-135m", 134.5), ("qwen2.5-0.5b", 494.0)),
    ],
)
def test_built_in_configurations_have_the_sizes_of_their_names(name: str, millions: float) -> None:
    assert parameters(settings_of(name)) / 1e6 == pytest.approx(millions, abs=0.1)


def test_draft_models_are_smaller_and_share_the_vocabulary() -> None:
    for name in CONFIGS:
        target, draft = settings_of(name), draft_settings(name)
        assert draft["vocab_size"] == target["vocab_size"]
        assert parameters(draft) < parameters(target) / 2
    assert draft_settings("llama-3.1-8b") == settings_of("llama-3.2-1b")


def test_a_config_json_or_its_folder_will_do(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["tiny"]))
    assert settings_of(str(path)) == settings_of(str(tmp_path)) == CONFIGS["tiny"]


@pytest.mark.parametrize("content", [None, "{", '{"vocab_size": 3}'])
def test_what_is_no_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=r"config\.json"):
        settings_of(str(path))


def test_a_seed_gives_the_same_weights_again_and_outputs_that_vary() -> None:
    one, same, other = (random_model("tiny", "target", torch.float32, "cpu", seed) for seed in (0, 0, 1))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        a, b, c = (model(ids).logits for model in (one, same, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert len(set(a.argmax(-1)[0].tolist())) > 10, "it does not repeat one token"
