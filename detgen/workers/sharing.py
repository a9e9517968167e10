"""Shares of machines for workers, a GPU or some of the cores each, and the folder of this machine's Ray."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from detgen.errors import EngineError

_PREFIX = "detgen-ray-"
_LOCK = "in-use"
_LONG = 40  # longest path, in characters; a socket's name of at most 107 characters might not fit behind a longer one


class Node(NamedTuple):
    """A machine: its cores and GPUs, as Ray counts them."""

    cores: int
    gpus: int


class Share(NamedTuple):
    """The resources of a worker.

    Attributes:
        number: number of workers.
        cores: cores of each.
        gpus: GPUs of each, 0 or 1.
    """

    number: int
    cores: int
    gpus: int


def share_out(nodes: list[Node], number: int | None, device: str) -> Share:
    """Divide machines among workers: one per GPU if there are GPUs, else one per share of the cores.

    Args:
        nodes: the machines.
        number: number of workers; None for one per GPU, or one per machine.
        device: `auto`, `cpu` or `cuda`, as in `EngineConfig`.

    Raises:
        EngineError: if there are fewer GPUs, or cores, than workers; or if a certain GPU is asked for.
    """
    if device.startswith("cuda:"):
        raise EngineError(f"--device {device} names one GPU; with workers, which have one each, use --device cuda")
    where = "this machine" if len(nodes) == 1 else f"the cluster of {len(nodes)} nodes"
    gpus = sum(node.gpus for node in nodes)
    if device != "cpu" and (gpus or device == "cuda"):
        wanted = number or gpus
        if not 0 < wanted <= gpus:
            raise EngineError(_too_many(wanted, gpus, "GPU", where) + ", or use --device cpu")
        with_gpus = [node for node in nodes if node.gpus]
        return Share(wanted, max(1, min(node.cores // node.gpus for node in with_gpus)), 1)
    wanted = number or len(nodes)
    cores = next((c for c in range(max(n.cores for n in nodes), 0, -1) if _fitting(nodes, c) >= wanted), 0)
    if not cores:
        raise EngineError(_too_many(wanted, _fitting(nodes, 1), "core", where))
    return Share(wanted, cores, 0)


def _fitting(nodes: list[Node], cores: int) -> int:
    """Return how many workers of so many cores the machines have room for."""
    return sum(node.cores // cores for node in nodes)


def _too_many(wanted: int, most: int, what: str, where: str) -> str:
    has = f"{most} {what}{'' if most == 1 else 's'}" if most else f"no {what}"
    need = f"1 worker needs a {what}" if wanted == 1 else f"{wanted} workers need a {what} each"
    return f"{need}, and {where} has {has}; ask for fewer --workers"


class ScratchFolder:
    """A new folder in the temporary directory; folders that killed processes left behind are removed.

    Attributes:
        path: path of the folder.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(str(place)) > _LONG:
            place = Path("/tmp")
        for left in place.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # in use, another user's, or already gone
                os.close(_lock(left))
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        (self.path / _LOCK).touch()
        self._file = _lock(self.path)

    def remove(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._file)


def _lock(folder: Path) -> int:
    """Lock a folder and return the file that holds the lock, until it is closed or the process ends.

    Raises:
        OSError: if the folder is locked, or there is no such file.
    """
    file = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
