"""What each worker gets of the machines, a GPU or a share of the cores, and the folder of this machine's Ray."""

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
_LONG = 40  # characters of a path behind which the name of a socket, of 107 characters at most, might not fit


class Node(NamedTuple):
    """A machine: its cores and its GPUs, as Ray counts them."""

    cores: int
    gpus: int


class Share(NamedTuple):
    """What a worker gets.

    Attributes:
        number: of workers.
        cores: of each.
        gpus: of each, 0 or 1.
    """

    number: int
    cores: int
    gpus: int


def share_out(nodes: list[Node], number: int | None, device: str) -> Share:
    """Divide machines among workers: one per GPU if there are GPUs, else one per share of the cores.

    Args:
        nodes: the machines.
        number: of workers; None for one per GPU, or one per machine.
        device: `auto`, `cpu` or `cuda`, as in `EngineConfig`.

    Raises:
        EngineError: there are fewer GPUs, or cores, than workers; or a certain GPU is asked for.
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
    """Workers of so many cores that the machines have room for."""
    return sum(node.cores // cores for node in nodes)


def _too_many(wanted: int, most: int, what: str, where: str) -> str:
    has = f"{most} {what}{'' if most == 1 else 's'}" if most else f"no {what}"
    need = f"1 worker needs a {what}" if wanted == 1 else f"{wanted} workers need a {what} each"
    return f"{need}, and {where} has {has}; ask for fewer --workers"


class ScratchFolder:
    """A new folder among the temporary ones; those that killed processes left behind are removed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(str(place)) > _LONG:
            place = Path("/tmp")
        for left in place.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # in use, another user's, or gone by now
                os.close(_lock(left))
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        (self.path / _LOCK).touch()
        self._file = _lock(self.path)

    def remove(self) -> None:
        """Remove it with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._file)


def _lock(folder: Path) -> int:
    """The file by which a folder is locked, until it is closed or the process ends.

    Raises:
        OSError: it is locked, or there is no such file.
    """
    file = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
