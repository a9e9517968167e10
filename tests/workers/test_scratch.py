"""The folder of a Ray: what a killed process left is removed, what is in use stays."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from detgen.workers.scratch import ScratchFolder


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.workers.scratch._LONG", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "detgen-ray-other").mkdir()  # of no process of ours
    left, used = ScratchFolder(), ScratchFolder()
    (left.path / "log").write_text("x")
    os.close(left._file)  # as the end of a process does
    last = ScratchFolder()
    assert set(tmp_path.iterdir()) == {used.path, last.path, tmp_path / "detgen-ray-other"}
    for folder in (used, last):
        folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["detgen-ray-other"]


def test_a_long_path_has_no_room_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = ScratchFolder()
    folder.remove()
    assert len(str(folder.path)) < 60
