"""A folder that holds a run already: one of another kind is refused, a finished one left alone, unless told to
overwrite."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fakes import (
    NAMES,
    FakeEngine,
    Watcher,
    config,
    content,
    go,
    kept_in,
    manifest_of,
    no_engine,
    stopping_at,
)

import detgen
from detgen.engine.config import EngineConfig
from detgen.errors import DEMO, EngineError, RunError
from detgen.params import SamplingParams
from detgen.program.operands import ARITHMETIC
from detgen.run import run


@pytest.mark.parametrize(
    ("detgen_version", "message"),
    [
        ("0.0.1", f"holds an unfinished run that differs from this one: .*detgen: 0.0.1 -> {detgen.__version__}"),
        (
            detgen.__version__,
            r"manifest\.json: input\.prompt_column is missing; .*: restore the file, or use another folder",
        ),
    ],
    ids=["another version", "an early build of this version"],
)
def test_a_run_whose_manifest_lacks_keys_is_refused_and_kept(
    tmp_path: Path, prompts: Path, detgen_version: str, message: str
) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    former = manifest_of(out) | {"detgen": detgen_version}
    del former["parameters"]["echo"]
    del former["input"]["prompt_column"]
    (out / "manifest.json").write_text(json.dumps(former))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert kept_in(out) > 0
    with pytest.raises(RunError, match=message):
        go(prompts, out, build=no_engine)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("finished", [False, True])
def test_another_profile_is_refused(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if finished else stopping_at(4))
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    with pytest.raises(RunError, match=r"profile\.device: cpu -> cuda"):
        go(prompts, out, build=lambda config: FakeEngine(config, device="cuda"))


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_of_another_arithmetic_is_refused_before_a_model_is_loaded(
    tmp_path: Path, prompts: Path, finished: bool
) -> None:
    """It has no sample in common with this one, and stays as it is."""
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if finished else stopping_at(4))
    former = manifest_of(out)
    former["profile"]["arithmetic"] = "detgen-1"
    (out / "manifest.json").write_text(json.dumps(former))
    before = content(out)
    message = f"run that was made by the arithmetic detgen-1; this detgen computes {ARITHMETIC}. Start over with"
    with pytest.raises(RunError, match=message):
        go(prompts, out, build=no_engine)
    assert content(out) == before
    assert go(prompts, out, overwrite=True).status == "finished"


def test_a_finished_run_is_left_alone(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = go(prompts, out)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)  # no telling without a model
    assert go(prompts, out).status == "already finished"
    monkeypatch.undo()
    (out / "samples.sqlite3-wal").write_text("left by a crash at the very end")
    summary = go(prompts, out, build=FakeEngine)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    assert summary.status == "already finished"
    assert replace(
        first, status="already finished", fresh=first.written, resumed=15, seconds=0.0, target_passes=0
    ) == replace(summary, peak_memory=first.peak_memory)


def test_a_finished_run_is_recognised_without_a_model(tmp_path: Path, prompts: Path) -> None:
    target = tmp_path / "model"
    shutil.copytree(DEMO / "target", target)
    asked = replace(config(prompts, tmp_path / "out"), engine=EngineConfig(target=target))
    run(asked, Watcher(), build_engine=FakeEngine)
    faster = replace(asked, engine=EngineConfig(target=target, batch_size=99))
    assert run(faster, Watcher(), build_engine=no_engine).status == "already finished"
    (target / "config.json").write_text('{"other": 1}')
    with pytest.raises(AssertionError, match="no model should be loaded"):
        run(asked, Watcher(), build_engine=no_engine)


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_finished_run_that_was_tampered_with_is_not_reported_as_done(
    tmp_path: Path, prompts: Path, name: str
) -> None:
    out = tmp_path / "out"
    go(prompts, out)
    with (out / name).open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=rf"{name} was changed after the run had finished; start over with --overwrite"):
        go(prompts, out, build=no_engine)
    (out / name).unlink()
    with pytest.raises(RunError, match=rf"{name} was deleted after the run had finished"):
        go(prompts, out, build=no_engine)
    assert go(prompts, out, overwrite=True).status == "finished"


def test_overwrite_starts_over_and_spares_the_rest(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    (out / "notes.txt").write_text("mine")
    summary = go(prompts, out, overwrite=True, params=SamplingParams(max_tokens=2))
    assert (summary.status, summary.resumed, summary.fresh.tokens) == ("finished", 0, 30)
    assert (out / "notes.txt").read_text() == "mine"


def test_an_engine_that_cannot_be_built_costs_the_former_run_nothing(tmp_path: Path, prompts: Path) -> None:
    def fail(config: EngineConfig) -> FakeEngine:
        raise EngineError("no such model")

    out = tmp_path / "out"
    with pytest.raises(EngineError):
        go(prompts, out, build=fail)
    assert not out.exists()
    go(prompts, out)
    before = content(out)
    with pytest.raises(EngineError):
        go(prompts, out, build=fail, overwrite=True)
    assert content(out) == before
