"""The folder in which a Ray of this machine keeps sockets and logs, for as long as it runs. Knows nothing of Ray."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "detgen-ray-"
_LOCK = "in-use"
_LONG = 40  # characters of a path behind which the name of a socket, of 107 characters at most, might not fit


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
