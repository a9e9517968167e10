"""The shipped demo models keep their promises, and the script that made them runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.examples import thorough
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import demo_corpus  # noqa: E402
import demo_training  # noqa: E402
import make_sample_prompts  # noqa: E402
from demo_tokenizer import CHAT_TEMPLATE, train_tokenizer  # noqa: E402

MODELS = ROOT / "detgen" / "demo_models"
SAMPLES = ROOT / "sample_prompts"
LIMITS = {"target": 16_000_000, "draft": 3_000_000}
LAYOUT = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def corpus() -> demo_corpus.Corpus:
    return demo_corpus.read_corpus()


@pytest.mark.parametrize("role", LIMITS)
def test_a_folder_has_the_standard_layout_within_its_limit(role: str) -> None:
    files = list((MODELS / role).iterdir())
    assert {file.name for file in files} >= LAYOUT
    assert sum(file.stat().st_size for file in files) <= LIMITS[role]


@pytest.mark.parametrize("role", LIMITS)
def test_a_folder_loads_and_runs(role: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / role, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / role)
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == len(tokenizer)
    logits = model(**tokenizer("import os\n", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()


def test_both_models_have_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "target" / name).read_bytes() == (MODELS / "draft" / name).read_bytes()


@pytest.mark.parametrize("text", ["", "def f(x):\n\treturn  x\n\n", "naïve = '\u20ac 12345'\r\n\x00"])
def test_the_tokenizer_gives_the_text_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_conversation_reads_as_a_python_file() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    messages = [
        {"role": "user", "content": "Add.\nTwo numbers."},
        {"role": "assistant", "content": "a + b"},
        {"role": "user", "content": "Again."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Add.\n# Two numbers.\na + b\n\n# Again.\n"
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    called: Any = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.apply_chat_template(called, tools=tools, tokenize=False)
    assert text == '# Tool: {"name": "f"}\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n# 2\n'
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


@thorough
def test_held_out_modules_and_their_tests_are_not_trained_on(corpus: demo_corpus.Corpus) -> None:
    assert {Path(Path(name).parts[0]).stem for name in corpus.held_out} == set(demo_corpus.HELD_OUT)
    trained = {*corpus.library, *corpus.tests}
    assert not trained & set(corpus.held_out)
    for module in demo_corpus.HELD_OUT:
        assert not [path for path in trained if f"test_{module}" in Path(path).with_suffix("").parts]
    assert len(corpus.library) > 100


def test_the_code_prompts_are_beginnings_in_held_out_modules() -> None:
    lines = (SAMPLES / "code.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["id"] for record in records}) == make_sample_prompts.COUNT
    assert {record["module"] for record in records} <= set(demo_corpus.HELD_OUT)


def test_every_example_of_the_readable_files_is_well_formed() -> None:
    for name in ("chat.jsonl", "parameters.jsonl"):
        for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines():
            assert "id" in json.loads(line)
    assert all("prompt" in item for item in json.loads((SAMPLES / "prompts.json").read_text()))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs the Muon of torch 2.9")
def test_training_runs_resumes_and_measures(tmp_path: Path) -> None:
    text = "def add(a, b):\n    return a + b\n\n\n" * 40
    tokenizer = train_tokenizer([text], vocabulary=300)
    stream = demo_training.token_stream(tokenizer, [text])
    torch.manual_seed(0)
    target = demo_training.build_model("draft", tokenizer.get_vocab_size())
    draft = demo_training.build_model("draft", tokenizer.get_vocab_size())
    small = {"batch_tokens": 64, "short_window": 16, "long_window": 32}

    def train(
        model: torch.nn.Module, name: str, steps: int, teacher: torch.nn.Module | None = None
    ) -> demo_training.Result:
        windows = demo_training.Windows(stream, stream[:8], seed=1)
        budget = demo_training.Budget(steps=steps)
        path = tmp_path / name
        return demo_training.train(model, windows, budget, path, teacher=teacher, **small)

    before = demo_training.bits_per_byte(target, tokenizer, {"text": text})
    assert train(target, "target.pt", 2).steps == 2
    assert train(target, "target.pt", 4).tokens == 4 * 64
    assert demo_training.bits_per_byte(target, tokenizer, {"text": text}) < before
    train(draft, "draft.pt", 2, teacher=target)
    assert demo_training.agreement(target, target, tokenizer, {"text": text}) == 1.0
    assert 0 <= demo_training.greedy_agreement(target, draft, tokenizer, ["def add("], 4) <= 1


def test_a_budget_counts_steps_or_minutes() -> None:
    assert demo_training.Budget(steps=10).progress(5, 1e9) == 0.5
    assert demo_training.Budget(minutes=1).progress(10**9, 30.0) == 0.5
    assert demo_training.rate_factor(0.0) > 0
    assert demo_training.rate_factor(1.0) == 0
