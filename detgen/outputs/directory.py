"""Access to the files of one folder through its descriptor; durable writes with helpful errors.

By the lock of an output folder, a run notices that the folder is no longer its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from detgen.errors import OutputError
from detgen.failing import limit_reached

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 1 << 20

# O_NONBLOCK: opening a pipe in place of a file would block.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotPlainError(OSError):
    """Something other than a plain file has the name of one; it was neither opened nor changed."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a message that names the file.

    Raises:
        OutputError: for any OSError inside the block.
    """
    try:
        yield
    except OSError as error:
        remedy = "fix that, then"
        if error.errno in _FULL:
            remedy = "free some space, then"
        elif isinstance(error, NotPlainError):
            remedy = "remove it, then"
        reason = error.strerror or str(error)
        if limit := limit_reached(error):
            reason, remedy = limit, "then"
        message = f"cannot write {path}: {reason}; {remedy} run the same command again to resume"
        raise OutputError(message) from error


def write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` to a file descriptor, unbuffered, so that no error comes later."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def open_plain(name: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a plain file; links are not followed, and nothing else is opened.

    Args:
        name: name of the file.
        flags: flags of `os.open`.
        folder: descriptor of the folder that contains the file; None: `name` is a path.

    Raises:
        NotPlainError: if it is a link, a pipe, a folder, a device or a socket.
        OSError: if it cannot be opened.
    """
    with suppress(FileNotFoundError):
        check_plain(name, folder)
    file = os.open(name, flags | _CAREFUL, 0o666, dir_fd=folder)
    try:
        _check(name, os.fstat(file))  # it may have been replaced in between
    except OSError:
        os.close(file)
        raise
    return file


def check_plain(name: str | Path, folder: int | None = None) -> None:
    """Check that a name belongs to a plain file; arguments and errors as for `open_plain`."""
    _check(name, os.stat(name, dir_fd=folder, follow_symlinks=False))


def _check(name: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotPlainError(errno.ELOOP, f"{Path(name).name} is {kind}, not a plain file")


class Directory:
    """A folder that is accessed only through its descriptor, so it stays the same one when it is renamed.

    Raises:
        OSError: by every method that opens or changes a file, on failure.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._file)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a plain file and return its descriptor; raises `NotPlainError` if it is something else."""
        return open_plain(name, flags, self._file)

    def reader(self, name: str) -> BinaryIO:
        """Open a plain file for reading."""
        return open(self.open(name), "rb")

    def create(self, name: str) -> int:
        """Create an empty file and return its descriptor; other hard links of a former file keep its content."""
        self.remove(name)
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file atomically: after a crash, too, a reader finds either the old content or the new."""
        with self.draft(name) as file:
            write_all(file, data)

    @contextmanager
    def draft(self, name: str) -> Iterator[int]:
        """Yield the descriptor of a new file, which durably replaces the named one at the end of the block."""
        file = self.create(f"{name}.tmp")
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        self.replace(f"{name}.tmp", name)

    def replace(self, name: str, other: str) -> None:
        """Rename a file over another, durably."""
        os.replace(name, other, src_dir_fd=self._file, dst_dir_fd=self._file)
        self.sync()

    def remove(self, name: str) -> None:
        """Delete a plain file, if it exists."""
        with suppress(FileNotFoundError):
            check_plain(name, self._file)
            os.unlink(name, dir_fd=self._file)

    def check(self, name: str) -> None:
        """Check that a name belongs to a plain file or to nothing."""
        with suppress(FileNotFoundError):
            check_plain(name, self._file)

    def sync(self) -> None:
        """Make additions, replacements and removals of files durable."""
        os.fsync(self._file)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        return os.listdir(self._file)

    def has(self, name: str) -> bool:
        """Return whether anything has that name."""
        return self.look(name) is not None

    def holds(self, name: str, file: int) -> bool:
        """Return whether the name still belongs to an open file."""
        found = self.look(name)
        return found is not None and os.path.samestat(found, os.fstat(file))

    def look(self, name: str) -> os.stat_result | None:
        """Return the stat of what has a name, without following links; None if there is nothing."""
        with suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._file, follow_symlinks=False)
        return None

    def deleted(self) -> bool:
        """Return whether the folder itself was deleted."""
        return os.fstat(self._file).st_nlink == 0

    def place(self) -> Path | None:
        """Return the folder's present path; None if it was deleted or the path cannot be found."""
        for path in (self._path, Path(f"/proc/self/fd/{self._file}")):
            with suppress(OSError):
                found = path if path is self._path else path.readlink()
                if os.path.samestat(found.stat(), os.fstat(self._file)):
                    return found
        return None


def make_folder(path: Path, mode: int = 0o777) -> bool:
    """Make a folder and its parents, durably; return whether it is new.

    Args:
        path: path of the folder.
        mode: its permissions.

    Raises:
        OSError: if it cannot be made.
    """
    try:
        path.mkdir(mode)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    with suppress(PermissionError):  # a parent may be writable, but not readable
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    return True


def free_folder(path: Path) -> Path:
    """Make a new folder of that name or, if the name is taken, of a similar one.

    Raises:
        OSError: if it cannot be made.
    """
    for number in count():
        place = path.with_name(path.name + ("" if not number else "-kept" if number == 1 else f"-kept-{number}"))
        if make_folder(place):
            return place
    raise AssertionError


def digest(file: int) -> str:
    """Return the SHA-256 of an open file from its beginning; the file position does not change."""
    sha256 = hashlib.sha256()
    at = 0
    while block := os.pread(file, _BLOCK, at):
        sha256.update(block)
        at += len(block)
    return sha256.hexdigest()


class FolderLostError(OutputError):
    """The folder was deleted or belongs to another run now; nothing in it may be changed any more."""


class Hold:
    """A lock on a folder, held from the moment it is created.

    It is a separate file, since not every file system can lock a folder.

    Attributes:
        path: path of the folder.

    Raises:
        BlockingIOError: if another run holds the lock.
        OutputError: if something other than a plain file has the lock's name.
        OSError: if the folder cannot be locked.
    """

    NAME = ".lock"

    def __init__(self, directory: Directory, path: Path) -> None:
        self.path = path
        self._directory = directory
        # Unlocking deletes the file, so the file that was just locked may be gone: then try again with a new one.
        while True:
            try:
                self._file = directory.open(self.NAME, os.O_RDWR | os.O_CREAT)
            except NotPlainError as error:
                raise OutputError(f"cannot lock {path}: {error.strerror}; remove it first") from error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if directory.holds(self.NAME, self._file):
                    return
            except OSError:
                os.close(self._file)
                raise
            os.close(self._file)

    def lost(self) -> str | None:
        """Return what happened to the folder if this run has lost it; None if it has not."""
        if self._directory.holds(self.NAME, self._file):
            return None
        if self._directory.deleted():
            return f"{self.path} was deleted while the run used it"
        if self._directory.has(self.NAME):
            return f"{self.path} was taken by another run, after its lock had been deleted"
        return f"{self.path / self.NAME} was deleted while the run used it"

    def release(self) -> None:
        """Delete the lock; allowed only while it is held."""
        self._directory.remove(self.NAME)

    def close(self) -> None:
        """Close the lock's file."""
        os.close(self._file)
