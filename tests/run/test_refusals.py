"""Folders and inputs that a run refuses, before it has loaded a model or written anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakes import FakeEngine, go, manifest_of, no_engine

from detgen.engine.config import EngineConfig
from detgen.errors import RunError


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_never_written_to(tmp_path: Path, prompts: Path, overwrite: bool) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "outputs.jsonl").write_text("years of work")
    with pytest.raises(RunError, match="holds files that are not of a detgen run"):
        go(prompts, out, build=no_engine, overwrite=overwrite)
    assert [path.read_text() for path in out.iterdir()] == ["years of work"]


def test_a_run_never_writes_into_its_input(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(RunError, match="is where the prompts are; choose another one with -o"):
        go(prompts, tmp_path, build=no_engine)
    with pytest.raises(RunError, match="is where the prompts are"):
        go(tmp_path, tmp_path / "out", build=no_engine)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.jsonl", None, r"there is no file .*missing\.jsonl"),
        ("empty.jsonl", "\n", r"no prompts in .*empty\.jsonl"),
        ("p.yaml", "a", r"p\.yaml: its name does not say what it holds"),
        ("p.csv", "a,b\n1,2\n", "no column prompt or messages among a, b"),
    ],
)
def test_an_input_that_cannot_be_read_leaves_nothing_behind(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=message):
        go(tmp_path / name, tmp_path / "out", build=no_engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [0, 10**20])
def test_a_limit_that_no_input_has_is_refused(tmp_path: Path, prompts: Path, limit: int) -> None:
    with pytest.raises(RunError, match=f"limit must be from 1 to 2147483647, got {limit}"):
        go(prompts, tmp_path / "out", build=no_engine, limit=limit)


def test_an_input_that_changes_on_the_way_is_refused(tmp_path: Path, prompts: Path) -> None:
    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: prompts.open("a").write("\n") and None if step == 2 else None
        return engine

    with pytest.raises(RunError, match=r"prompts\.jsonl changed while it was read"):
        go(prompts, tmp_path / "out", build=build)
    assert manifest_of(tmp_path / "out")["status"] == "running"
