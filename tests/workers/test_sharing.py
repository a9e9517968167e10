"""What workers get of machines, and what is refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from detgen.errors import EngineError
from detgen.workers.sharing import Node, ScratchFolder, Share, share_out
from detgen.workers.worker_config import WorkersConfig

TWO_CORES = [Node(2, 0)]
CLUSTER = [Node(8, 0), Node(8, 0), Node(4, 0)]
GPUS = [Node(16, 4), Node(16, 4), Node(8, 0)]


@pytest.mark.parametrize(
    ("nodes", "number", "device", "wanted"),
    [
        (TWO_CORES, 2, "auto", Share(2, 1, 0)),
        (TWO_CORES, 1, "cpu", Share(1, 2, 0)),
        ([Node(8, 0)], 3, "cpu", Share(3, 2, 0)),
        (CLUSTER, None, "auto", Share(3, 4, 0)),
        (CLUSTER, 5, "auto", Share(5, 4, 0)),
        (CLUSTER, 6, "auto", Share(6, 2, 0)),
        (CLUSTER, 20, "auto", Share(20, 1, 0)),
        (GPUS, None, "auto", Share(8, 4, 1)),
        (GPUS, 3, "cuda", Share(3, 4, 1)),
        (GPUS, None, "cpu", Share(3, 8, 0)),
    ],
)
def test_shares(nodes: list[Node], number: int | None, device: str, wanted: Share) -> None:
    assert share_out(nodes, number, device) == wanted


@pytest.mark.parametrize(
    ("nodes", "number", "device", "message"),
    [
        (TWO_CORES, 3, "cpu", "^3 workers need a core each, and this machine has 2 cores; ask for fewer --workers$"),
        (CLUSTER, 21, "auto", "^21 workers need a core each, and the cluster of 3 nodes has 20 cores"),
        (GPUS, 9, "auto", "9 workers need a GPU each, .* 8 GPUs; ask for fewer --workers, or use --device cpu$"),
        (TWO_CORES, 1, "cuda", "^1 worker needs a GPU, and this machine has no GPU"),
        (TWO_CORES, None, "cuda", "this machine has no GPU"),
        (GPUS, 2, "cuda:1", "--device cuda:1 names one GPU"),
    ],
)
def test_refusals(nodes: list[Node], number: int | None, device: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        share_out(nodes, number, device)


@pytest.mark.parametrize(
    ("number", "ray", "message"),
    [
        (0, None, "workers must be a whole number of at least 1, got 0"),
        (-1, "auto", "workers must be a whole number of at least 1, got -1"),
        (10**6, None, "workers must be at most 100000"),
        (None, "head", "ray must be auto or HOST:PORT"),
        (None, ":6379", "ray must be auto or HOST:PORT"),
        (None, "head:99999", "ray must be auto or HOST:PORT"),
        (None, "ray://head:10001", "ray must be auto or HOST:PORT"),
    ],
)
def test_what_cannot_be_asked_for(number: int | None, ray: str | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        WorkersConfig(number, ray)


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.workers.sharing._LONG", 1000)
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
