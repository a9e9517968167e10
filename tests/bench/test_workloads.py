from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from detgen import Engine, EngineConfig, Request
from detgen.bench.cells import fitted_workloads
from detgen.bench.config import BenchConfig
from detgen.bench.model_source import Target, resolve
from detgen.bench.peer_interface import Workload
from detgen.bench.workloads import check_name, make_workload, split_name
from detgen.errors import DEMO, BenchError
from detgen.progress import Unobserved


def make(name: str, *, requests: int = 8, scale: float = 1.0, seed: int = 0, vocabulary: int = 100) -> Workload:
    target: Any = SimpleNamespace(vocabulary=vocabulary, encode=lambda request: [ord(c) for c in request.prompt])
    return make_workload(name, requests, scale, BenchConfig(seed=seed, max_tokens=5), target)


def test_fixed_shapes_have_their_lengths_times_the_scale() -> None:
    for name, scale, shape in (("1024x256", 1.0, (1024, 256)), ("4096x1024", 1 / 16, (256, 64))):
        workload = make(name, scale=scale)
        assert {(len(p.tokens), p.output) for p in workload.prompts} == {shape}
        assert workload.longest == sum(shape)
    assert all(0 <= t < 100 for p in workload.prompts for t in p.tokens)


def test_mixes_follow_their_stated_distributions() -> None:
    prompts = make("sharegpt", requests=2000).prompts
    assert mean(len(p.tokens) for p in prompts) == pytest.approx(161, rel=0.07)
    assert mean(p.output for p in prompts) == pytest.approx(338, rel=0.07)
    prompts = make("arxiv", requests=300, scale=0.1).prompts
    assert median(len(p.tokens) for p in prompts) == pytest.approx(706, rel=0.1)
    assert "log-normal" in make("arxiv").origin


def test_a_seed_draws_the_same_prompts_again_and_another_one_others() -> None:
    assert make("sharegpt", seed=3) == make("sharegpt", seed=3)
    assert make("sharegpt", seed=3).prompts != make("sharegpt", seed=4).prompts


def test_fewer_requests_are_the_first_ones() -> None:
    for name in ("sharegpt", "sample"):
        assert make(name, requests=5).prompts == make(name, requests=8).prompts[:5]


def test_sample_holds_the_embedded_prompts_and_starts_over() -> None:
    workload = make("sample", requests=70, vocabulary=10**6)
    assert len(workload.prompts) == 70
    assert workload.prompts[0] == workload.prompts[64] != workload.prompts[1]
    assert "".join(map(chr, workload.prompts[0].tokens)).startswith("def insort_right")


def test_a_file_gives_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("ab\ncd\n")
    assert [p.tokens for p in make(f"file:{path}", requests=2).prompts] == [(97, 98), (99, 0)]


MESSAGES = [{"role": "user", "content": "Name three rivers."}]
CHAT = json.dumps({"messages": MESSAGES}) + "\n"


@pytest.fixture(scope="module")
def embedded() -> Target:
    return resolve(BenchConfig(), Unobserved())


def test_chats_are_rendered_by_the_models_template(tmp_path: Path, embedded: Target) -> None:
    """The ids are those of the rendered text, which has its special tokens already, and those that are given stay."""
    path = tmp_path / "chats.jsonl"
    tools = {"messages": MESSAGES, "chat_template_kwargs": {"no_such_variable": 1}}
    path.write_text(CHAT + '{"prompt_token_ids": [5, 6, 7]}\n{"prompt": "def "}\n')
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = [tokenizer(rendered, add_special_tokens=False).input_ids, [5, 6, 7], tokenizer("def ").input_ids]
    workload = make_workload(f"file:{path}", 3, 1.0, BenchConfig(max_tokens=5), embedded)
    assert [list(p.tokens) for p in workload.prompts] == expected
    path.write_text(CHAT + json.dumps(tools))
    with pytest.raises(BenchError, match=r"chats\.jsonl:2: the model's chat template does not use no_such_variable"):
        make_workload(f"file:{path}", 2, 1.0, BenchConfig(), embedded)


def test_a_chat_for_a_model_without_a_template_is_refused_as_by_a_run(tmp_path: Path) -> None:
    path, model = tmp_path / "chats.jsonl", tmp_path / "model"
    path.write_text(CHAT)
    shutil.copytree(DEMO / "target", model, ignore=shutil.ignore_patterns("chat_template*"))
    target = resolve(BenchConfig(engine=EngineConfig(target=str(model))), Unobserved())
    with pytest.raises(BenchError) as refused:
        make_workload(f"file:{path}", 1, 1.0, BenchConfig(), target)
    (completion,) = Engine(str(model), drafter="none").generate([Request(0, 0, messages=MESSAGES)])
    assert str(refused.value) == f"chats.jsonl:1: {completion.error}"
    assert "no chat template" in str(completion.error)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "missing.jsonl"), ('{"prompt": 3}\n', "without bad lines"), ('{"prompt": "a"}\n{\n', "without bad lines")],
)
def test_a_file_that_is_no_workload_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=said):
        make(f"file:{path}", requests=1)


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match="sample, chats, file:PATH, long-prompts"):
        make("sharegtp")


def test_a_workload_at_a_temperature() -> None:
    plain, hot = make("sample"), make("sample@0.8")
    assert (hot.name, hot.temperature, plain.temperature) == ("sample@0.8", 0.8, 0.0)
    assert hot.prompts == plain.prompts
    assert make("long-answers@1").temperature == 1
    assert split_name("file:prompts@home.txt") == ("file:prompts@home.txt", 0.0)
    with pytest.raises(BenchError, match="sample@-1: a temperature is from 0 to 10,000"):
        check_name("sample@-1")


def test_chats_are_the_sample_as_chats(tmp_path: Path, told: Any) -> None:
    target = resolve(BenchConfig(output=tmp_path), told)
    sample, chats = (make_workload(name, 3, 1.0, BenchConfig(), target) for name in ("sample", "chats"))
    for plain, chat in zip(sample.prompts, chats.prompts, strict=True):
        assert len(chat.tokens) > len(plain.tokens)
    assert chats.origin == "the embedded prompts, each as a chat, 64 tokens each"


def test_long_prompts_and_long_answers_are_as_long_as_they_say(tmp_path: Path, told: Any) -> None:
    target = resolve(BenchConfig(output=tmp_path, random_weights="tiny"), told)
    found = fitted_workloads(BenchConfig(workloads=("long-prompts", "long-answers")), target)
    assert [(len(w.prompts[0].tokens), w.prompts[0].output) for w in found] == [(1024, 16), (32, 512)]
