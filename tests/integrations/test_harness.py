"""detgen in EleutherAI's harness: local tasks, the same results in every batch, those of the harness's own model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_inputs import code

lm_eval = pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'detgen[lm-eval]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

from detgen import Engine  # noqa: E402
from detgen.engine.scored import rolling_windows  # noqa: E402
from detgen.integrations.lm_eval import DetgenLM  # noqa: E402
from detgen.models.loading import pick_device  # noqa: E402

TOLERANCE = 1e-4

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/docs.jsonl"}, cache_dir: "FOLDER/cache"}
test_split: test
"""
TASKS = {
    "choosing": """
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
num_fewshot: 0
""",
    "reading": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{rest}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: bleu}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions to be chosen, read and written, and the tasks that say so."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = code(16)
    docs = []
    for i, text in enumerate(texts):
        start, rest = text[: len(text) // 2], text[len(text) // 2 :]
        others = [texts[(i + step) % len(texts)][: len(rest)] for step in (1, 2, 3)]
        docs.append({"start": start, "rest": rest, "choices": [rest, *others], "text": text})
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.replace('FOLDER', str(folder))}{task}")
    return folder


@pytest.fixture(scope="module")
def hf(demo_models: Any) -> HFLM:
    return HFLM(pretrained=str(demo_models.target), device="cpu", dtype="float32", batch_size=4)


def evaluate(model: Any, tasks: Path, *names: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The results of tasks, and what the model said of each document."""
    found = lm_eval.simple_evaluate(
        model,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    said = {
        name: [(sample["resps"], sample["doc_id"]) for sample in sorted(found["samples"][name], key=_document)]
        for name in names
    }
    return found["results"], said


def _document(sample: dict[str, Any]) -> int:
    return int(sample["doc_id"])


def test_tasks_have_the_same_results_in_every_batch(engine: Engine, tasks: Path, hf: HFLM) -> None:
    """Equal as they are, not only nearly; beside the harness's own model, equal but for rounding."""
    first = None
    for size in (1, 3, 16):
        plain = engine.with_settings(prefix_cache=size != 3)
        results, said = evaluate(DetgenLM(engine=plain, batch_size=size), tasks, *TASKS)
        first = first or (results, said)
        assert repr((results, said)) == repr(first), size
    assert first is not None
    results, said = first
    theirs, they_said = evaluate(hf, tasks, *TASKS)
    assert said["writing"] == they_said["writing"]
    for name in ("choosing", "reading"):
        for (mine, doc), (own, same) in zip(said[name], they_said[name], strict=True):
            assert doc == same
            for a, b in zip(_numbers(mine), _numbers(own), strict=True):
                assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE)
    for name, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs[name][metric], rel=TOLERANCE), (name, metric)
    assert 0.25 < results["choosing"]["acc,none"] <= 1
    assert 1 < results["reading"]["byte_perplexity,none"] < 8


def _numbers(said: Any) -> list[float]:
    """Whatever the answers to a document hold."""
    if isinstance(said, list | tuple):
        return [number for part in said for number in _numbers(part)]
    return [float(said)]


def test_scores_are_those_of_the_harness(engine: Engine, hf: HFLM) -> None:
    """Token by token the same question: white space, empty contexts, texts and prompts that are too long."""
    lm = DetgenLM(engine=engine, batch_size=5)
    long = "".join(code(40))
    pairs = [("def f", "(x):"), ("x =\n ", "1"), ("", "import os"), ("a", " b" * 30), (long, " pass"), ("é", "è\n")]
    instances = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    mine, own = lm.loglikelihood(instances, disable_tqdm=True), hf.loglikelihood(instances, disable_tqdm=True)
    for (a, greedy), (b, theirs) in zip(mine, own, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE)
        assert greedy == theirs
    assert len(lm.tok_encode(long)) > lm.max_length == 1024
    texts = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate((long, "x", code(1)[0]))]
    short = DetgenLM(engine=engine, max_length=100)
    hf_short = HFLM(pretrained=hf.model, tokenizer=hf.tokenizer, max_length=100, batch_size=2)
    for ours, harness in ((lm, hf), (short, hf_short)):
        found = ours.loglikelihood_rolling(texts, disable_tqdm=True)
        assert found == pytest.approx(harness.loglikelihood_rolling(texts, disable_tqdm=True), rel=TOLERANCE)
    assert lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("",), 0)], disable_tqdm=True) == [0.0]


def test_generation(engine: Engine, hf: HFLM) -> None:
    """A prompt that is too long loses its beginning, as much as the harness takes off."""
    lm, (short, *_) = DetgenLM(engine=engine), code(1)
    for context, asked in ((short, {"max_gen_toks": 9}), ("".join(code(40)), {"max_gen_toks": 5, "until": ["\n\n"]})):
        instances = [Instance("generate_until", {}, (context, asked), 0)]
        assert lm.generate_until(instances, disable_tqdm=True) == hf.generate_until(instances, disable_tqdm=True)


def test_the_command_line(tasks: Path, tmp_path: Path) -> None:
    """The harness's own, with detgen among its models."""
    words = ["run", "--model", "detgen", "--model_args", "drafter=none,kv_memory=30000000", "--tasks", "reading"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "detgen.integrations.lm_eval",
            *words,
            "--include_path",
            tasks,
            "--output_path",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "byte_perplexity" in done.stdout
    (written,) = tmp_path.rglob("results_*.json")
    results = json.loads(written.read_text())
    assert results["config"]["detgen_profile"]["arithmetic"] == "detgen-2"
    assert results["config"]["device"] == str(pick_device("auto"))
    assert results["model_name"] == "embedded:target"


def test_chats(engine: Engine) -> None:
    lm = DetgenLM(engine=engine)
    chat = [{"role": "user", "content": "sort a list"}]
    template: Callable[..., Any] = engine.tokenizer.apply_chat_template
    assert lm.apply_chat_template(chat) == template(chat, tokenize=False, add_generation_prompt=True)
    assert lm.chat_template(True) == engine.tokenizer.chat_template
    assert lm.tokenizer_name


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 30])
def test_windows_are_those_of_the_harness(length: int) -> None:
    tokens = list(range(length))
    windows = map(make_disjoint_window, get_rolling_token_windows(tokens, 99, 8, 1))
    assert [(w.tokens[: -w.scored], w.tokens[-w.scored :]) for w in rolling_windows(tokens, 99, 8)] == list(windows)


def test_prompts_and_completions_are_joined_as_in_the_harness(engine: Engine, hf: HFLM) -> None:
    for prompt, completion in (("def f", "(x):"), ("x =\n ", "1"), ("a b ", " c"), ("é", "è")):
        before, behind = hf._encode_pair(prompt, completion)
        (score,) = engine.score((prompt, completion))
        assert (score.prompt_tokens, list(score.token_ids)) == (len(before), behind)
