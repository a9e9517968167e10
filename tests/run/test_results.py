"""`--output-format openai`: results beside the outputs, whole or not at all, and the same bytes in every run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import NAMES, FakeEngine, Watcher, content, go, lines, manifest_of, no_engine, stopping_at

from detgen.engine.config import EngineConfig
from detgen.errors import EngineError, RunError
from detgen.outputs import batch_results, log_file
from detgen.params import SamplingParams
from detgen.run import RunConfig, RunSummary, run

MESSAGES = [{"role": "user", "content": "hi"}]


def asked(id: str, **body: Any) -> str:
    url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": {"model": "other", **body}})


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Requests of each kind, and lines that cannot run."""
    texts = [asked(f"text {n}", prompt=f"prompt {n}") for n in range(8)]
    texts += [asked("chat", messages=MESSAGES, n=3), asked("logs", messages=MESSAGES, logprobs=True, top_logprobs=1)]
    texts += [asked("stream", messages=MESSAGES, stream=True), "{broken", asked("chat", messages=MESSAGES)]
    texts += [asked("long", prompt="too long"), asked("part", prompt="overflow 1", n=2), '{"prompt": "plain"}']
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(texts))
    return path


def listed(folder: Path) -> dict[str, Any]:
    data = (folder / "results.jsonl").read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_a_line_for_each_request(tmp_path: Path, batch: Path) -> None:
    out, watcher = tmp_path / "out", Watcher()
    summary = go(batch, out, watcher, output_format="openai")
    found = lines(out / "results.jsonl")
    ids = [*(f"text {n}" for n in range(8)), "chat", "logs", "stream", "12", "chat", "long", "part", "16"]
    assert [line["custom_id"] for line in found] == ids
    status = {line["custom_id"]: line["response"]["status_code"] for line in found if line["error"]}
    assert status == {"stream": 400, "12": 400, "chat": 400, "long": 400, "part": 500}
    assert len(found[8]["response"]["body"]["choices"]) == 3
    assert len({line["id"] for line in found}) == len(found)
    assert manifest_of(out)["files"]["results.jsonl"] == listed(out)
    assert summary.results == listed(out)["sha256"]
    assert sum("asks for the model other" in message for message in watcher.messages) == 1
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES, "results.jsonl"])


def test_the_other_files_do_not_change(tmp_path: Path, batch: Path) -> None:
    go(batch, tmp_path / "a", output_format="openai")
    assert go(batch, tmp_path / "b").results is None
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert not (tmp_path / "b" / "results.jsonl").exists()


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path, batch: Path, step: int) -> None:
    go(batch, tmp_path / "a", output_format="openai")
    go(batch, tmp_path / "b", build=stopping_at(step), output_format="openai")
    assert manifest_of(tmp_path / "b")["status"] == "interrupted"
    assert not (tmp_path / "b" / "results.jsonl").exists()
    go(batch, tmp_path / "b", output_format="openai", batch_size=2)
    assert (tmp_path / "a" / "results.jsonl").read_bytes() == (tmp_path / "b" / "results.jsonl").read_bytes()


@pytest.fixture
def stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run is recognised without a model."""
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: "same")


@pytest.mark.usefixtures("stamped")
def test_a_finished_run_is_given_results_without_a_model(tmp_path: Path, batch: Path) -> None:
    go(batch, tmp_path / "a", output_format="openai")
    go(batch, tmp_path / "b")
    before = content(tmp_path / "b")
    summary = go(batch, tmp_path / "b", build=no_engine, output_format="openai")
    assert (summary.status, summary.results) == ("already finished", listed(tmp_path / "a")["sha256"])
    assert manifest_of(tmp_path / "b")["files"]["results.jsonl"] == listed(tmp_path / "b")
    assert content(tmp_path / "b") == before


@pytest.mark.usefixtures("stamped")
@pytest.mark.parametrize("change", ["deleted", "changed", "a folder"])
def test_results_that_were_changed_are_written_again(tmp_path: Path, batch: Path, change: str) -> None:
    out, watcher = tmp_path / "out", Watcher()
    go(batch, out, output_format="openai")
    was = listed(out)
    assert go(batch, out, watcher, build=no_engine, output_format="openai").results == was["sha256"]
    assert watcher.messages == []
    path = out / "results.jsonl"
    path.unlink()
    if change == "changed":
        path.write_text("{}\n")
    if change == "a folder":
        path.mkdir()
        with pytest.raises(RunError, match=r"results\.jsonl is a folder, not a plain file; remove it"):
            go(batch, out, build=no_engine, output_format="openai")
        path.rmdir()
    go(batch, out, watcher, build=no_engine, output_format="openai")
    assert listed(out) == was
    assert watcher.messages == [f"{path} is not what the run had written; it is written again"]


def test_overwriting_deletes_results(tmp_path: Path, batch: Path) -> None:
    go(batch, tmp_path / "out", output_format="openai")
    go(batch, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert "results.jsonl" not in manifest_of(tmp_path / "out")["files"]


def test_nobody_finds_half_of_the_results(tmp_path: Path, batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full while they are written ends the run; the same command goes on."""
    out = tmp_path / "out"
    monkeypatch.setattr(log_file, "_BLOCK", 1)

    class Full(log_file.DigestedFile):
        def flush(self) -> None:
            super().flush()
            assert (out / "results.jsonl.tmp").stat().st_size
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(batch_results, "DigestedFile", Full)
        with pytest.raises(RunError, match=r"cannot write .*results\.jsonl: No space left"):
            go(batch, out, output_format="openai")
    assert not (out / "results.jsonl").exists()
    assert manifest_of(out)["status"] == "running"
    go(batch, out, output_format="openai")
    assert manifest_of(out)["files"]["results.jsonl"] == listed(out)
    assert not (out / "results.jsonl.tmp").exists()


def test_a_tokenizer_is_needed_for_log_probabilities_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"

    def start(**body: Any) -> RunSummary:
        path.write_text(asked("a", prompt="x", **body))
        engine = EngineConfig(target="no/such-model")
        config = RunConfig(
            str(path), tmp_path / "out", SamplingParams(), engine, overwrite=True, output_format="openai"
        )
        return run(config, Watcher(), build_engine=FakeEngine)

    assert start().results
    with pytest.raises(EngineError, match="cannot load the model no/such-model"):
        start(logprobs=1)


def test_inputs_of_other_forms_have_results_too(tmp_path: Path) -> None:
    from datasets import Dataset

    prompts = ["one", "two", "too long"]
    Dataset.from_dict({"prompt": prompts}).save_to_disk(tmp_path / "dataset")
    Dataset.from_dict({"prompt": prompts}).to_parquet(tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text("prompt\n" + "\n".join(prompts) + "\n")
    for name in ("dataset", "p.parquet", "p.csv"):
        go(tmp_path / name, tmp_path / f"{name}-out", output_format="openai")
        found = lines(tmp_path / f"{name}-out" / "results.jsonl")
        assert [line["response"]["status_code"] for line in found] == [200, 200, 400]
        assert [line["response"]["body"].get("object") for line in found] == ["text_completion"] * 2 + [None]
