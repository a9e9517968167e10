"""A run all of whose samples are there: no model is loaded, unless it is not the one that a store describes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import Watcher, content, manifest_of

from detgen.cache import open_store
from detgen.cache.cache_folder import prune
from detgen.engine.config import EngineConfig
from detgen.outputs import parse_manifest
from detgen.outputs.store import STORE
from detgen.params import SamplingParams
from detgen.run import RunConfig, RunSummary, ScoreConfig, lifecycle, run

SAID = "all samples exist already: no model is loaded"
PROMPTS = [{"prompt": "def f(", "n": 2}, {"prompt": 3}, {"prompt": "import ", "temperature": 0.5}]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded."""
    load, made = lifecycle.load_engine, list[Any]()

    def noted(*given: Any) -> Any:
        made.append(load(*given))
        return made[-1]

    monkeypatch.setattr(lifecycle, "load_engine", noted)
    return made


@pytest.fixture
def model(demo_models: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_models.draft, tmp_path / "model"))


@pytest.fixture
def go(tmp_path: Path, model: Path, loads: list[Any]) -> Callable[..., tuple[int, RunSummary, Watcher]]:
    """A run of the model into a folder through a cache; and how many models it loads."""

    def go(name: str, records: list[dict[str, Any]] = PROMPTS, **engine: Any) -> tuple[int, RunSummary, Watcher]:
        path, watcher, before = tmp_path / f"{name}.jsonl", Watcher(), len(loads)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = EngineConfig(**{"target": str(model), "kv_memory": 16 << 20, **engine})
        params = SamplingParams(max_tokens=6)
        summary = run(RunConfig(str(path), tmp_path / name, params, settings, cache=tmp_path / "cache"), watcher)
        assert summary.status == "finished"
        return len(loads) - before, summary, watcher

    return go


def test_nothing_is_loaded_where_nothing_is_generated(tmp_path: Path, go: Callable[..., Any]) -> None:
    assert go("a")[0] == 1
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    loaded, summary, watcher = go("b", PROMPTS[::-1], batch_size=3, drafter="none")
    assert (loaded, summary.reused, summary.fresh.samples, summary.written.errors) == (0, 3, 0, 1)
    assert SAID in watcher.messages
    a, b = manifest_of(tmp_path / "a"), manifest_of(tmp_path / "b")
    assert [b[part] for part in ("profile", "draft")] == [a[part] for part in ("profile", "draft")]
    assert parse_manifest((tmp_path / "b" / "manifest.json").read_bytes(), tmp_path) == b
    fresh, *_ = go("fresh", PROMPTS[::-1], target_quant="q8")
    assert fresh == 1, "of another quantization, nothing is known"
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "fresh")
    go("fresh", PROMPTS[::-1])
    assert (
        content(tmp_path / "b")["outputs.jsonl"].replace(b"b.jsonl", b"fresh.jsonl")
        == (content(tmp_path / "fresh")["outputs.jsonl"])
    )


def test_one_new_sample_loads_the_model(go: Callable[..., Any]) -> None:
    go("a")
    loaded, summary, watcher = go("b", [*PROMPTS, {"prompt": "class "}])
    assert (loaded, summary.reused, summary.fresh.samples, SAID in watcher.messages) == (1, 3, 1, False)


def test_other_weights_of_the_same_size_and_time_are_seen(model: Path, go: Callable[..., Any]) -> None:
    go("a")
    (weights,) = model.glob("*.safetensors")
    before = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    loaded, summary, _ = go("b")
    assert (loaded, summary.reused, summary.fresh.samples) == (1, 0, 3)


def test_a_damaged_sample_loads_the_model_after_all(tmp_path: Path, go: Callable[..., Any]) -> None:
    go("a")
    with closing(sqlite3.connect(tmp_path / "cache" / STORE)) as db, db:
        db.execute("UPDATE packed SET value = x'00' WHERE id = (SELECT min(id) FROM packed)")
    loaded, summary, watcher = go("b")
    assert (loaded, summary.reused, summary.fresh.samples) == (1, 2, 1)
    assert SAID in watcher.messages
    assert (
        content(tmp_path / "b")["outputs.jsonl"].replace(b"b.jsonl", b"a.jsonl")
        == (content(tmp_path / "a")["outputs.jsonl"])
    )


def test_a_draft_model_is_described_too(tmp_path: Path, model: Path, go: Callable[..., Any]) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    go("a")
    assert go("b", draft=str(draft))[0] == 1, "of the draft model, nothing is known"
    loaded, *_ = go("c", draft=str(draft))
    assert loaded == 0
    assert manifest_of(tmp_path / "c")["draft"] == manifest_of(tmp_path / "b")["draft"] is not None


def test_pruning_forgets_engines(tmp_path: Path, go: Callable[..., Any]) -> None:
    go("a")
    with open_store(tmp_path / "cache") as store:
        prune(store)
        prune(store)
    loaded, summary, _ = go("b")
    assert (loaded, summary.reused) == (1, 3)


def test_the_folder_alone_is_enough(tmp_path: Path, model: Path, loads: list[Any]) -> None:
    """For runs and for scores, of other prompts and after a kill."""
    path, out, settings = tmp_path / "p.jsonl", tmp_path / "out", EngineConfig(target=str(model), kv_memory=16 << 20)
    texts = [json.dumps(record) + "\n" for record in PROMPTS]

    def again(records: list[str], config: RunConfig | ScoreConfig) -> tuple[int, RunSummary, list[str]]:
        watcher, before = Watcher(), len(loads)
        path.write_text("".join(records))
        summary = run(config, watcher)
        return len(loads) - before, summary, watcher.messages

    asked = RunConfig(str(path), out, SamplingParams(max_tokens=6), settings)
    assert again(texts, asked)[0] == 1
    whole = content(out)
    loaded, summary, said = again(texts[::-1], asked)
    assert (loaded, summary.resumed, SAID in said) == (0, 3, True)
    manifest = manifest_of(out) | {"status": "running"}
    del manifest["files"], manifest["summary"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert again(texts[::-1], asked)[0] == 0
    assert again(texts, asked)[0] == 0
    assert content(out) == whole
    assert again([*texts, '{"prompt": "new"}'], asked)[0] == 1
    lines = ['{"prompt": "a", "completion": " b"}\n', '{"text": "some text"}\n']
    scored = ScoreConfig(str(path), tmp_path / "scores", settings)
    assert again(lines, scored)[0] == 1
    loaded, summary, said = again(lines[:1], scored)
    assert (loaded, summary.resumed, SAID in said) == (0, 1, True)
