"""Scoring a file: the same lines in any batch, after any interruption; and a folder that knows what it holds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import FakeEngine, Watcher, go, lines, manifest_of, no_engine

from detgen import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.errors import RunError
from detgen.outputs.store import STORE
from detgen.run import RunSummary, ScoreConfig, run

LINES: list[Any] = [
    {"id": "one", "prompt": "def add(a, b):\n", "completion": "    return a + b\n", "note": 1},
    {"id": "several", "prompt": "import", "completions": [" os", " sys", " re"]},
    {"id": "text", "text": "class Node:\n    def __init__(self):\n"},
    {"id": "wrong", "prompt": "x", "completion": 3},
    {"id": "long", "prompt": "x = 1\n" * 700, "completion": "y"},
    *({"id": f"t{i}", "text": f"for i in range({i}):\n    print(i)\n"} for i in range(12)),
    {"id": "empty", "text": ""},
    {"id": "last", "prompt": "return ", "completions": ["a", "b"], "metadata": {"deep": [1]}},
]


class Scoring:
    """An engine that counts, and is interrupted or fails after some scores."""

    def __init__(self, engine: Engine, stop: int | None = None, error: BaseException | None = None) -> None:
        self.scored = 0
        self._engine, self._stop, self._error = engine, stop, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        for scores in self._engine.score_stream(requests):
            self.scored += len(scores)
            if self._stop is not None and self.scored >= self._stop:
                self._stop = None
                if self._error is not None:
                    raise self._error
                os.kill(os.getpid(), signal.SIGINT)
            yield scores


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(drafter="none", kv_memory=32 << 20)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "{broken\n")
    return path


def score(prompts: Path, output: Path, engine: Any, watcher: Watcher | None = None, **changes: Any) -> RunSummary:
    config = ScoreConfig(str(prompts), output, EngineConfig(drafter="none"), **changes)
    return run(config, watcher or Watcher(), build_engine=lambda _: engine)


def test_the_lines(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    """What each says is what the engine says; those that cannot be scored are errors, with their place."""
    summary = score(prompts, tmp_path / "out", engine)
    found = lines(tmp_path / "out" / "outputs.jsonl")
    assert [(line["id"], line["sample"]) for line in found[:6]] == [
        ("one", 0),
        ("several", 0),
        ("several", 1),
        ("several", 2),
        ("text", 0),
        ("wrong", 0),
    ]
    (expected,) = engine.score(("def add(a, b):\n", "    return a + b\n"))
    assert found[0] == {
        "id": "one",
        "index": 0,
        "sample": 0,
        "logprob": expected.logprob,
        "is_greedy": expected.is_greedy,
        "token_ids": list(expected.token_ids),
        "prompt_tokens": expected.prompt_tokens,
        "completion_tokens": len(expected.token_ids),
        "logprobs": [
            {"token": t, "logprob": p, "greedy": g, "text": engine.pieces.of(t).text}
            for t, p, g in zip(expected.token_ids, expected.logprobs, expected.greedy, strict=True)
        ],
        "metadata": {"note": 1},
    }
    errors = {line["id"]: line["error"] for line in found if "error" in line}
    assert errors == {
        "wrong": "p.jsonl:4: completion must be a string, got a number",
        "long": "p.jsonl:5: the prompt has 2799 tokens and the completion 2, the model's context is 1024",
        "empty": "p.jsonl:18: text is empty",
        "20": "p.jsonl:20: not valid JSON: Expecting property name enclosed in double quotes at column 2",
    }
    assert found[-2]["metadata"] == {"deep": [1]}
    written = summary.written
    assert (summary.status, written.prompts, written.samples, written.errors) == ("finished", 20, 19, 4)
    assert summary.written.tokens == sum(line.get("completion_tokens", 0) for line in found)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "outputs.jsonl", STORE]
    manifest = manifest_of(tmp_path / "out")
    assert (manifest["command"], manifest["parameters"]) == ("score", {"limit": None, "echo": False})
    assert list(manifest["files"]) == ["outputs.jsonl"]


def test_the_same_bytes_in_any_batch(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    first = score(prompts, tmp_path / "a", engine)
    for name, settings in (
        ("b", {"batch_size": 1}),
        ("c", {"batch_size": 3, "prefix_cache": False, "threads": 1}),
        ("d", {"prefill_chunk": 5}),
    ):
        assert score(prompts, tmp_path / name, engine.with_settings(**settings)).sha256 == first.sha256


@pytest.mark.parametrize("stop", [1, 4, 9, 15])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, prompts: Path, engine: Engine, stop: int) -> None:
    """After Ctrl-C and after a crash; what was finished is not scored again."""
    small = engine.with_settings(batch_size=2)
    whole = score(prompts, tmp_path / "whole", small)
    for name, error in (("signal", None), ("crash", MemoryError())):
        out = tmp_path / name
        if error is None:
            assert score(prompts, out, Scoring(small, stop)).status == "interrupted"
        else:
            with pytest.raises(MemoryError):
                score(prompts, out, Scoring(small, stop, error))
        watcher, again = Watcher(), Scoring(small)
        second = score(prompts, out, again, watcher)
        assert (second.status, second.sha256) == ("finished", whole.sha256)
        assert (out / "outputs.jsonl").read_bytes() == (tmp_path / "whole" / "outputs.jsonl").read_bytes()
        assert watcher.messages[0].startswith(f"resuming {out}: ")
        assert again.scored <= 20 + 1 - second.resumed
        assert second.resumed > 0 or stop == 1


def test_a_finished_folder_is_left_alone(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    out = tmp_path / "out"
    first = score(prompts, out, engine)
    config = ScoreConfig(str(prompts), out, EngineConfig(drafter="none", batch_size=3))
    again = run(config, Watcher(), build_engine=no_engine)
    assert (again.status, again.sha256) == ("already finished", first.sha256)
    (out / "outputs.jsonl").write_text("")
    with pytest.raises(RunError, match=r"outputs\.jsonl was changed after the run had finished"):
        run(config, Watcher(), build_engine=no_engine)


def test_runs_and_scores_do_not_share_a_folder(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    """Neither takes the other for one of its own, finished or not; --overwrite leaves nothing of the other's."""
    out = tmp_path / "out"
    score(prompts, out, engine)
    with pytest.raises(RunError, match="holds a finished run that differs from this one: command: score -> run"):
        go(prompts, out, build=no_engine)
    assert go(prompts, out, build=FakeEngine, overwrite=True).status == "finished"
    assert (out / "acceptance.jsonl").exists()
    with pytest.raises(RunError, match=r"a finished run that differs from this one: command: run -> score\. Start"):
        score(prompts, out, engine)
    assert score(prompts, out, engine, overwrite=True).status == "finished"
    assert not (out / "acceptance.jsonl").exists()


def test_echo_and_limit(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    score(prompts, tmp_path / "out", engine, echo=True, limit=3)
    found = lines(tmp_path / "out" / "outputs.jsonl")
    assert len(found) == 5
    assert (found[0]["prompt"], found[0]["completion"]) == ("def add(a, b):\n", "    return a + b\n")
    assert [line["completion"] for line in found[1:4]] == [" os", " sys", " re"]
    assert (found[4]["text"], "prompt" in found[4]) == (LINES[2]["text"], False)


def test_the_folder_is_named_after_the_file(
    tmp_path: Path, prompts: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ScoreConfig("p.jsonl", None, EngineConfig(drafter="none"), limit=1)
    assert run(config, Watcher(), build_engine=lambda _: engine).output == Path("p-scores")


def test_a_limit_and_a_file_may_change(tmp_path: Path, prompts: Path, engine: Engine) -> None:
    """A score is taken again in its place only."""
    out = tmp_path / "out"
    assert score(prompts, out, Scoring(engine), limit=3).fresh.samples == 5
    again = Scoring(engine)
    summary = score(prompts, out, again)
    assert (summary.resumed, summary.fresh.samples) == (5, 14)
    assert (out / "outputs.jsonl").read_bytes() == _fresh(prompts, engine)
    assert score(prompts, out, again, limit=3).fresh.samples == 0
    first, *rest = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join([first, *rest[3:]]))
    assert score(prompts, out, again).resumed == 1
    assert (out / "outputs.jsonl").read_bytes() == _fresh(prompts, engine)


def _fresh(prompts: Path, engine: Engine) -> bytes:
    score(prompts, prompts.parent / "fresh", engine, overwrite=True)
    return (prompts.parent / "fresh" / "outputs.jsonl").read_bytes()


def test_other_completions_are_not_taken(tmp_path: Path, engine: Engine) -> None:
    """The digest of a request has its completions."""
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "a", "completion": " b"}\n{"prompt": "a", "completion": " c"}\n')
    score(path, out, engine)
    path.write_text('{"prompt": "a", "completion": " x"}\n{"prompt": "a", "completion": " c"}\n')
    summary = score(path, out, engine)
    assert (summary.resumed, summary.fresh.samples) == (1, 1)
    assert (out / "outputs.jsonl").read_bytes() == _fresh(path, engine)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["parameters"].update(max_tokens=3), "parameters.max_tokens is unknown"),
        (lambda m: m["parameters"].pop("echo"), "parameters.echo is missing"),
        (lambda m: m.update(command="train"), "command is unknown"),
        (lambda m: m.pop("command"), "parameters.max_tokens is missing"),
        (lambda m: m["files"].update({"acceptance.jsonl": m["files"]["outputs.jsonl"]}), "is unknown"),
        (lambda m: m.pop("files"), "files is missing, though the status is finished"),
    ],
)
def test_a_manifest_that_no_scoring_writes_is_refused(
    tmp_path: Path, prompts: Path, engine: Engine, change: Any, said: str
) -> None:
    out = tmp_path / "out"
    score(prompts, out, engine, limit=1)
    manifest = manifest_of(out)
    change(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=rf"manifest\.json: .*{said}.*; detgen writes no such manifest"):
        score(prompts, out, engine, limit=1)
