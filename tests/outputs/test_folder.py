"""The output folder: one run at a time, and nothing of anybody else's is touched."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from detgen.errors import OutputError
from detgen.outputs import FolderLostError, OutputFolder
from detgen.outputs.directory import Directory

STORES = ("samples.sqlite3", "samples.sqlite3-wal", "samples.sqlite3-journal", "samples-damaged.sqlite3")
INPUT = {"path": "p.jsonl", "format": "jsonl", "sha256": "00"}
MANIFEST = {"detgen": "1", "status": "running", "input": INPUT, "parameters": {}}


def test_only_one_run_may_have_a_folder(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out"), pytest.raises(OutputError, match="another run is writing to"):
        OutputFolder(tmp_path / "out").__enter__()
    with OutputFolder(tmp_path / "out"):
        pass


def test_a_folder_that_nothing_came_of_is_removed(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "a" / "out"):
        pass
    assert not (tmp_path / "a" / "out").exists()
    (tmp_path / "mine").mkdir()
    with OutputFolder(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "outputs.jsonl", ".git"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        OutputError, match=rf"holds files that are not of a detgen run \({name}\); choose another folder"
    ):
        OutputFolder(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "not JSON",
        '{"status": "finished", "name": "other tool"}',
        json.dumps(MANIFEST | {"input": {}}),
        json.dumps(MANIFEST | {"input": "p.jsonl"}),
    ],
)
def test_a_manifest_of_another_tool_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OutputError, match=r"manifest\.json"):
        OutputFolder(tmp_path).__enter__()
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        OutputFolder(tmp_path / "out").__enter__()


def test_what_a_crash_left_before_the_manifest_is_no_obstacle(tmp_path: Path) -> None:
    for name in (".lock", "stdin.jsonl.tmp", "manifest.json.tmp"):
        (tmp_path / name).write_text("half")
    with OutputFolder(tmp_path) as folder:
        assert folder.manifest() is None
        folder.write_manifest(MANIFEST)
        assert folder.manifest() == MANIFEST


def test_clearing_deletes_only_what_a_run_wrote(tmp_path: Path) -> None:
    with OutputFolder(tmp_path) as folder:
        folder.write_manifest(MANIFEST)
        for name in ("outputs.jsonl", "acceptance.jsonl", *STORES, "stdin.jsonl", "notes.txt"):
            (tmp_path / name).write_text("x")
        folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_manifest_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OutputFolder(tmp_path) as folder:
        folder.write_manifest(MANIFEST)

        def full(file: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OutputError, match=r"cannot write .*manifest\.json: No space left on device"):
            folder.write_manifest(MANIFEST | {"status": "finished"})
        assert folder.manifest() == MANIFEST


def test_a_folder_whose_lock_is_anothers_is_not_changed(tmp_path: Path) -> None:
    with OutputFolder(tmp_path) as folder:
        folder.write_manifest(MANIFEST)
        assert folder.receive(io.BytesIO(b"piped"))
        for name in ("outputs.jsonl", "samples.sqlite3"):
            (tmp_path / name).write_text("x")
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for change in (folder.drop_drafts, folder.clear, folder.keep_received, folder.check):
            with pytest.raises(FolderLostError, match="was taken by another run, after its lock had been deleted"):
                change()
        with pytest.raises(FolderLostError):
            folder.write_manifest(MANIFEST | {"status": "finished"})
        assert folder.note_crash("Traceback") is None
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_is_planted_in_the_very_moment_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OutputFolder(tmp_path) as folder:
        (tmp_path / "outputs.jsonl").write_text("planted")
        monkeypatch.setattr(Directory, "remove", lambda *_: None)
        with pytest.raises(FileExistsError):
            folder.directory.create("outputs.jsonl")
        monkeypatch.undo()
    assert (tmp_path / "outputs.jsonl").read_text() == "planted"
