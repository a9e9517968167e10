"""Somebody changes, deletes or renames the output folder in mid-run: nothing is lost, nothing is claimed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import NAMES, FakeEngine, Watcher, content, go, lines, manifest_of, stopping_at

import detgen.outputs.writer
from detgen.engine.config import EngineConfig
from detgen.errors import RunError
from detgen.outputs import OutputFolder
from detgen.outputs.folder import ASIDE
from detgen.outputs.store import STORE

Build = Callable[[EngineConfig], FakeEngine]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit, and look at the folder, in each step."""
    monkeypatch.setattr(detgen.outputs.writer, "SPARING", 0)
    monkeypatch.setattr(detgen.outputs.writer, "LOOK_SECONDS", 0)


def meddling(action: Callable[[], object], step: int = 6) -> Build:
    """An engine during whose step something happens to the folder."""

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda now: action() and None if now == step else None
        return engine

    return build


def _truncate(path: Path) -> None:
    os.truncate(path, 5)


def _overwrite(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in data))


def _replace(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize(
    ("action", "said"),
    [
        (Path.unlink, "was deleted"),
        (_truncate, "was changed"),
        (_overwrite, "was changed"),
        (_replace, "was replaced by another"),
    ],
)
def test_files_that_were_changed_are_written_again(
    tmp_path: Path, prompts: Path, name: str, action: Callable[[Path], None], said: str
) -> None:
    out, watcher = tmp_path / "out", Watcher()
    summary = go(prompts, out, watcher, build=meddling(lambda: action(out / name)))
    assert watcher.messages == [f"{out / name} {said} while the run wrote it; it will be written again from the store"]
    whole = go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)
    assert (summary.sha256, summary.written, summary.fresh) == (whole.sha256, whole.written, whole.fresh)
    assert summary.resumed == 0


def test_files_that_keep_changing_end_the_run_with_the_store_in_place(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"

    class Watching(Watcher):
        def progress(self, progress: Any) -> None:
            if progress.done == 16:
                (out / "outputs.jsonl").unlink(missing_ok=True)

    with pytest.raises(
        RunError, match=r"outputs\.jsonl was deleted again and again while the run wrote it; nothing is"
    ):
        go(prompts, out, Watching())
    assert manifest_of(out)["status"] == "running"
    assert go(prompts, out).resumed == 15
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_a_folder_that_was_emptied_is_filled_again(tmp_path: Path, prompts: Path) -> None:
    """As by `rm out/*`, which leaves the lock."""
    out, watcher = tmp_path / "out", Watcher()
    go(prompts, out, watcher, build=meddling(lambda: [path.unlink() for path in out.glob("[!.]*")]))
    deleted = "was deleted while the run used it; it is written again"
    assert watcher.messages[:2] == [f"{out / 'manifest.json'} {deleted}", f"{out / STORE} {deleted}"]
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
    assert manifest_of(out)["status"] == "finished"
    assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("deleted", [[STORE], [f"{STORE}-wal"], [STORE, f"{STORE}-wal"]])
def test_a_store_that_was_deleted_is_there_for_the_next_run(tmp_path: Path, prompts: Path, deleted: list[str]) -> None:
    """Also if it is SQLite's file beside it, without which a crash would cost what is not in the store itself."""
    out = tmp_path / "out"

    def build(config: EngineConfig) -> FakeEngine:
        engine = stopping_at(8)(config)
        stop = engine.on_step
        engine.on_step = lambda now: [(out / name).unlink() for name in deleted] if now == 5 else stop(now)
        return engine

    assert go(prompts, out, build=build).status == "interrupted"
    assert go(prompts, out).resumed > 3
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("name", [STORE, f"{STORE}-wal"])
@pytest.mark.parametrize("action", [_truncate, _overwrite])
def test_a_store_that_was_changed_ends_the_run(
    tmp_path: Path, prompts: Path, name: str, action: Callable[[Path], None]
) -> None:
    """What is whole in it is taken by the next one."""
    out, watcher = tmp_path / "out", Watcher()
    with pytest.raises(RunError, match=rf"{STORE} was changed while the run used it; run the same command again"):
        go(prompts, out, build=meddling(lambda: action(out / name)))
    assert go(prompts, out, watcher).status == "finished"
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir() if path.name != ASIDE) == sorted(NAMES)


def test_the_work_of_a_deleted_folder_is_kept(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "a" / "out"
    message = f"{out} was deleted while the run used it; what was finished is kept in {out}: run the same command again"
    with pytest.raises(RunError, match=message):
        go(prompts, out, build=meddling(lambda: shutil.rmtree(tmp_path / "a")))
    watcher = Watcher()
    assert go(prompts, out, watcher).resumed > 0
    assert "finished samples kept" in watcher.messages[0]
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_a_lost_folder_is_noticed_at_the_next_write(tmp_path: Path, prompts: Path) -> None:
    engines: list[FakeEngine] = []

    def build(config: EngineConfig) -> FakeEngine:
        engines.append(meddling(lambda: shutil.rmtree(tmp_path / "out"), step=3)(config))
        return engines[0]

    with pytest.raises(RunError, match="out was deleted while the run used it"):
        go(prompts, tmp_path / "out", build=build)
    assert engines[0].stats.target_passes == 3


def test_a_folder_that_another_run_took_is_left_to_it(tmp_path: Path, prompts: Path) -> None:
    """The first run's folder is deleted, and a second run makes one of the same name, with other prompts."""
    out, other = tmp_path / "out", tmp_path / "other.jsonl"
    other.write_text('{"prompt": "other"}\n')
    folders = []

    def taken() -> None:
        shutil.rmtree(out)
        folders.append(OutputFolder(out).__enter__())
        folders[0].write_manifest(manifest)
        (out / STORE).write_text("the second run's")

    go(other, tmp_path / "manifest")
    manifest = manifest_of(tmp_path / "manifest") | {"status": "running"}
    kept = tmp_path / "out-kept"
    with pytest.raises(
        RunError, match=f"{out} was deleted while .* run the same command again with -o {kept} to resume"
    ):
        go(prompts, out, build=meddling(taken))
    assert manifest_of(out) == manifest
    assert (out / STORE).read_text() == "the second run's"
    assert (out / ".lock").exists()
    folders[0].__exit__(None, None, None)
    assert go(prompts, kept).resumed > 0
    go(prompts, tmp_path / "whole")
    assert content(kept) == content(tmp_path / "whole")


def test_a_folder_that_was_taken_at_the_very_end_is_left_alone(tmp_path: Path, prompts: Path) -> None:
    """Also by the last changes: manifest, store, lock, the folder itself."""
    out = tmp_path / "out"

    class Watching(Watcher):
        def progress(self, progress: Any) -> None:
            if progress.done == 16 and not (tmp_path / "gone").exists():
                shutil.copytree(out, tmp_path / "gone")
                shutil.rmtree(out)
                out.mkdir()

    with pytest.raises(RunError, match=r"was deleted while the run used it; what was finished is kept in .*out-kept"):
        go(prompts, out, Watching())
    assert list(out.iterdir()) == []
    assert go(prompts, tmp_path / "out-kept").resumed == 15


def test_a_run_whose_lock_was_deleted_stops(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RunError, match=r"\.lock was deleted while the run used it; what was finished is kept in"):
        go(prompts, out, build=meddling((out / ".lock").unlink))
    assert go(prompts, out).resumed > 0

    def taken() -> None:
        (tmp_path / "second" / ".lock").unlink()
        (tmp_path / "second" / ".lock").write_text("")

    with pytest.raises(RunError, match="second was taken by another run, after its lock had been deleted"):
        go(prompts, tmp_path / "second", build=meddling(taken))
    assert (tmp_path / "second" / ".lock").exists()


def test_a_folder_that_is_taken_while_the_model_is_loaded_is_left_alone(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"

    def build(config: EngineConfig) -> FakeEngine:
        shutil.rmtree(out)
        out.mkdir()
        (out / "manifest.json").write_text("the second run's")
        return FakeEngine(config)

    with pytest.raises(RunError, match="out was deleted while the run used it; run the same command again"):
        go(prompts, out, build=build)
    assert [path.read_text() for path in out.iterdir()] == ["the second run's"]


@pytest.mark.parametrize("piped", [False, True])
def test_a_run_goes_on_in_a_renamed_folder(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, piped: bool
) -> None:
    out, new, watcher = tmp_path / "out", tmp_path / "new", Watcher()
    given: Path | str = prompts
    if piped:
        monkeypatch.setattr("sys.stdin", prompts.open())
        given = "-"

    def rename() -> None:
        out.rename(new)
        out.mkdir()
        (out / "somebody's").write_text("")

    summary = go(given, out, watcher, build=meddling(rename))
    assert watcher.messages == [
        f"{out} was renamed to {new} while the run used it; the run goes on there (should it be interrupted, resume it"
        f" with -o {new})"
    ]
    assert (summary.status, summary.output) == ("finished", new)
    assert [path.name for path in out.iterdir()] == ["somebody's"]
    assert sorted(path.name for path in new.iterdir()) == sorted([*NAMES, *["stdin.jsonl"] * piped])
    assert len(lines(new / "outputs.jsonl")) == 18
    assert manifest_of(new)["status"] == "finished"


def test_an_internal_error_leaves_its_traceback_in_the_folder(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"

    def crash() -> None:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError) as caught:
        go(prompts, out, build=meddling(crash))
    log = out / "detgen-error.log"
    assert caught.value.__notes__ == [
        f"the traceback is in {log}",
        "what was finished is kept: run the same command again to resume",
    ]
    assert log.read_text().startswith("Traceback")
    assert log.read_text().endswith("ZeroDivisionError: planted\n")
    assert go(prompts, out).resumed > 0
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")

    def fail(config: EngineConfig) -> FakeEngine:
        raise ZeroDivisionError

    early = tmp_path / "early"
    with pytest.raises(ZeroDivisionError):
        go(prompts, early, build=fail)
    assert [path.name for path in early.iterdir()] == ["detgen-error.log"]
    assert go(prompts, early).status == "finished"
    assert go(prompts, out, overwrite=True).status == "finished"
    assert not log.exists()


def test_a_limit_of_memory_leaves_no_traceback(tmp_path: Path, prompts: Path) -> None:
    def crash() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        go(prompts, tmp_path / "out", build=meddling(crash))
    assert not (tmp_path / "out" / "detgen-error.log").exists()
