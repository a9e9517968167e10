"""A run says what generation_config.json would change in the texts of transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import invoke

from detgen import LLM
from detgen.models.generation_settings import unapplied_settings
from detgen.params import SamplingParams

SETTINGS: dict[str, Any] = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": [7]}
# As transformers wrote them beside models before it left out what changes nothing, and what greedy texts do not use.
NEUTRAL: dict[str, Any] = {
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": []},
    **{"num_beams": 1, "do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [5, 7]},
}


def unapplied(folder: Path, settings: dict[str, Any], **params: Any) -> list[str]:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return [text.split()[2] for text in unapplied_settings(folder, SamplingParams(**params))]


def test_settings_are_named_that_are_not_applied(tmp_path: Path) -> None:
    assert unapplied_settings(tmp_path, SamplingParams()) == []
    assert unapplied(tmp_path, SETTINGS) == list(SETTINGS)
    assert unapplied(tmp_path, NEUTRAL) == []


def test_what_the_user_has_set_is_not_named(tmp_path: Path) -> None:
    assert unapplied(tmp_path, SETTINGS, repetition_penalty=1.3) == ["no_repeat_ngram_size", "suppress_tokens"]


def test_a_run_says_so_with_the_remedy(demo_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in demo_models.draft.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "repetition_penalty": 1.1}))
    monkeypatch.chdir(tmp_path)
    command = ["run", "--prompt", "def add(", "--max-tokens", "2", "--target", "model", "-o"]
    said = (
        "detgen: model: generation_config.json sets repetition_penalty to 1.1, which generate() of transformers applies"
        " and detgen does not; the parameter repetition_penalty does the same here\n"
    )
    assert said in invoke(*command, "out").stderr
    with pytest.warns(UserWarning, match="model: generation_config.json sets repetition_penalty to 1.1, which"):
        LLM("model", kv_memory="16MB")
    assert "generation_config" not in invoke(*command, "other", "--repetition-penalty", "1.2").stderr
