"""What somebody planted in an output folder is neither followed nor waited for, and folders are made durably."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fakes import NAMES, content, go, kept_in, stopping_at

from detgen.errors import OutputError, RunError
from detgen.outputs import OutputFolder
from detgen.outputs.directory import Directory, NotPlainError, make_folder, open_plain
from detgen.outputs.folder import ASIDE
from detgen.outputs.store import STORE, beside

OWN = (
    *NAMES,
    "results.jsonl",
    "results.jsonl.tmp",
    *beside(STORE),
    ASIDE,
    "stdin.jsonl",
    ".lock",
    "stdin.jsonl.tmp",
    "manifest.json.tmp",
    f"{STORE}.tmp",
)


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # its path may be 100 bytes long at most
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a symbolic link": _link,
    "a named pipe": os.mkfifo,  # type: ignore[dict-item]
    "a folder": Path.mkdir,
    "a socket": _socket,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OWN)
def test_whatever_is_no_plain_file_is_refused_by_name(tmp_path: Path, prompts: Path, name: str, kind: str) -> None:
    out = tmp_path / "out"
    (tmp_path / "precious").write_text("precious")
    go(prompts, out, build=stopping_at(4))
    (out / name).unlink(missing_ok=True)
    KINDS[kind](out / name)
    before = sorted(path.name for path in out.iterdir() if path.name != ".lock")
    for overwrite in (False, True):
        with pytest.raises(RunError, match=rf"{name} is {kind}, not a plain file; remove it"):
            go(prompts, out, overwrite=overwrite)
    assert (tmp_path / "precious").read_text() == "precious"
    assert sorted(path.name for path in out.iterdir() if path.name != ".lock") == before


@pytest.mark.parametrize("name", [*NAMES, *beside(STORE), "manifest.json.tmp", f"{STORE}.tmp"])
def test_a_link_that_is_planted_in_mid_run_is_not_followed(tmp_path: Path, prompts: Path, name: str) -> None:
    out = tmp_path / "out"
    (tmp_path / "precious").write_text("precious")

    def build(config: object) -> object:
        engine = stopping_at(100)(config)  # type: ignore[arg-type]

        def plant(step: int) -> None:
            if step == 4:
                (out / name).unlink(missing_ok=True)
                _link(out / name)

        engine.on_step = plant
        return engine

    try:
        go(prompts, out, build=build)
    except RunError:
        (out / name).unlink()
        go(prompts, out)
    assert (tmp_path / "precious").read_text() == "precious"
    go(prompts, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_other_names_of_an_output_file_keep_its_content(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    os.link(out / "outputs.jsonl", tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    os.link(out / STORE, tmp_path / "store")
    with pytest.raises(RunError, match=r"samples\.sqlite3 has another name, too \(a hard link\)"):
        go(prompts, out)
    (tmp_path / "store").unlink()
    go(prompts, out)
    assert (tmp_path / "backup").read_bytes() == before


def test_a_file_that_is_exchanged_for_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and the opening."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("detgen.outputs.directory.check_plain", lambda *_: None)
    with pytest.raises(NotPlainError, match="pipe is a named pipe"):
        open_plain(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_plain(tmp_path / "link")


def test_a_store_behind_a_link_is_not_read(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "out", build=stopping_at(4))
    assert kept_in(tmp_path / "out") > 0
    (tmp_path / "out" / STORE).rename(tmp_path / "there")
    (tmp_path / "out" / STORE).symlink_to(tmp_path / "there")
    assert kept_in(tmp_path / "out") == 0


def test_every_folder_that_is_made_is_made_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def noting(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    assert make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert not make_folder(tmp_path / "a" / "b" / "c")
    monkeypatch.chdir(tmp_path)
    assert make_folder(Path("relative"))
    assert synced[3:] == [str(tmp_path)]


def test_a_folder_that_vanishes_while_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a run that ends, which wrote nothing."""
    out = tmp_path / "out"
    opened = Directory.__init__
    tries = []

    def racing(self: Directory, path: Path) -> None:
        opened(self, path)
        tries.append(path)
        if len(tries) == 1:
            path.rmdir()

    monkeypatch.setattr(Directory, "__init__", racing)
    with OutputFolder(out):
        assert (out / ".lock").exists()
    assert len(tries) == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(OutputError, match=r"cannot use the folder .*dangling: File exists; choose another"):
        OutputFolder(tmp_path / "dangling").__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot use the folder .*: Not a directory; choose another"):
        OutputFolder(tmp_path / "file" / "out").__enter__()
