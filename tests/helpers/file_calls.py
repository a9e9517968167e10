"""What a process does to the files of a folder, written down, and what a disk would have of it after a crash.

`file_calls.c` is loaded before the C library and sees all calls, those of SQLite like those of Python. So a crash need
not be waited for: every prefix of the calls is one.
"""

from __future__ import annotations

import os
import random
import shlex
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
SECTOR = 512  # bytes that a disk writes whole

Death = Literal["killed", "torn", "power"]


@dataclass(frozen=True)
class Call:
    """A call that succeeded; the letters are those of `file_calls.c`."""

    what: str
    inode: int
    at: int
    data: bytes

    @property
    def paths(self) -> list[str]:
        """What the data are of calls that name files."""
        return os.fsdecode(self.data).split("\0")


def library(folder: Path) -> Path:
    """Compile the library that is to be loaded first."""
    made = folder / "file_calls.so"
    if not made.exists():
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        subprocess.run(
            [*compiler, "-shared", "-fPIC", "-O1", "-o", made, HERE / "file_calls.c", "-ldl", "-lpthread"], check=True
        )
    return made


def environment(
    library: Path, under: Path, log: Path | None = None, fail: int = 0, error: int = 0, **more: str
) -> dict[str, str]:
    """Of a process whose calls are written down, or of which that number and all later ones fail."""
    package = HERE.parent.parent
    path = os.pathsep.join([str(package), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    made = {**os.environ, "LD_PRELOAD": str(library), "FILE_CALLS_UNDER": str(under), "PYTHONPATH": path, **more}
    if log is not None:
        made["FILE_CALLS_LOG"] = str(log)
    if fail:
        made |= {"FILE_CALLS_FAIL": str(fail), "FILE_CALLS_ERROR": str(error)}
    return made


def record(
    library: Path, under: Path, command: Sequence[str], statuses: Sequence[int] = (0,), **more: str
) -> list[Call]:
    """Run a Python program to its end, which has one of these statuses; what it did to the files below a folder."""
    log = under.with_name(f"{under.name}-calls")
    log.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, *command],
        env=environment(library, under, log, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in statuses, run.stderr
    data, at, calls = log.read_bytes(), 0, []
    while at < len(data):
        what, inode, offset, size = struct.unpack_from("4q", data, at)
        calls.append(Call(chr(what), inode, offset, data[at + 32 : at + 32 + size]))
        at += 32 + size
    return calls


@dataclass
class _File:
    """A file as the process sees it, as it was when it was last synced, and what was done since."""

    now: bytearray
    synced: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)  # where and what; None sets the size

    def write(self, at: int, data: bytes) -> None:
        self.since.append((at, data))
        _write(self.now, at, data)

    def resize(self, size: int) -> None:
        self.since.append((size, None))
        _resize(self.now, size)

    def sync(self) -> None:
        self.synced = bytes(self.now)
        self.since.clear()

    def after_power_cut(self, draw: random.Random) -> bytearray:
        """What is synced, and any sectors of what was written since; sizes change in order."""
        left, share = bytearray(self.synced), draw.choice((0.0, 0.5, 0.9, 1.0))
        for at, data in self.since:
            if data is None:
                _resize(left, at)
                continue
            start = at
            while start < at + len(data):
                end = min((start // SECTOR + 1) * SECTOR, at + len(data))
                if draw.random() < share:
                    _write(left, start, data[start - at : end - at])
                start = end
        if len(left) < len(self.now) and draw.random() < 0.3:
            _resize(left, len(self.now))  # a file system may know the size and not the blocks
        return left


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _write(data: bytearray, at: int, new: bytes) -> None:
    if at > len(data):
        _resize(data, at)
    data[at : at + len(new)] = new


class Disk:
    """A folder, whose calls are made again one by one.

    A power cut keeps what was synced, and of the rest any sectors; names come to be and go in the order of the calls,
    the last of them may be lost unless their folder was synced, and a new file that was not may have no name at all.
    Folders themselves are kept.
    """

    def __init__(self, under: Path) -> None:
        """Take the folder as it is now, all of it synced."""
        self._under = under
        self._folders = {str(path) for path in (under, *under.rglob("*")) if path.is_dir()}
        self._names: dict[str, _File] = {}
        self._inodes: dict[int, _File] = {}
        for path in under.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                self._names[str(path)] = self._inodes[path.stat().st_ino] = _File(bytearray(data), data)
        self._synced_names = dict(self._names)
        # Folder, path, file (None: it goes), and whether that is new.
        self._changes: list[tuple[str, str, _File | None, bool]] = []

    def make(self, call: Call) -> None:
        """Make a call again."""
        if call.what == "M":
            self._folders.add(call.paths[0])
        elif call.what == "C":
            file = self._inodes[call.inode] = _File(bytearray())
            self._name(call.paths[0], file, new=True)
        elif call.what == "W":
            self._inodes[call.inode].write(call.at, call.data)
        elif call.what == "T":
            self._inodes[call.inode].resize(call.at)
        elif call.what == "R":
            old, new = call.paths
            self._name(new, self._names[old])
            self._name(old, None)
        elif call.what == "U":
            if call.paths[0] in self._names:
                self._name(call.paths[0], None)
            else:
                self._folders.discard(call.paths[0])
        elif call.paths[0] in self._folders:
            self._sync_folder(call.paths[0])
        elif call.inode in self._inodes:
            self._inodes[call.inode].sync()

    def tear(self, call: Call, draw: random.Random) -> None:
        """Make a part of a call."""
        if call.what == "W":
            self._inodes[call.inode].write(call.at, call.data[: draw.randrange(len(call.data))])

    def leave(self, power: random.Random | None) -> None:
        """Write the folder as a killed process leaves it, or a power cut."""
        for path in sorted(self._under.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for folder in sorted(self._folders):
            Path(folder).mkdir(exist_ok=True)
        names = self._names if power is None else self._names_after_power_cut(power)
        for path, file in sorted(names.items()):
            if os.path.dirname(path) in self._folders:
                Path(path).write_bytes(file.now if power is None else file.after_power_cut(power))

    def _name(self, path: str, file: _File | None, new: bool = False) -> None:
        self._changes.append((os.path.dirname(path), path, file, new))
        _set(self._names, path, file)

    def _sync_folder(self, folder: str) -> None:
        for change in self._changes:
            if change[0] == folder:
                _set(self._synced_names, change[1], change[2])
        self._changes = [change for change in self._changes if change[0] != folder]

    def _names_after_power_cut(self, draw: random.Random) -> dict[str, _File]:
        names = dict(self._synced_names)
        for _, path, file, new in self._changes[: draw.randint(0, len(self._changes))]:
            if not new or draw.random() < 0.7:
                _set(names, path, file)
        return names


def _set(names: dict[str, _File], path: str, file: _File | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


def crash(before: Disk, calls: Sequence[Call], at: int, death: Death, seed: int) -> None:
    """Leave a folder as it is when the process, or the machine, dies at a call.

    Args:
        before: the folder before the first call.
        calls: all of them.
        at: the call that is not made any more, or, torn, not all of it.
        death: in which way.
        seed: of what is left.
    """
    draw = random.Random(seed)
    for call in calls[:at]:
        before.make(call)
    if death == "torn" or (death == "power" and draw.random() < 0.5):
        before.tear(calls[at], draw)
    before.leave(draw if death == "power" else None)


def content_of(under: Path) -> Mapping[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(under)): path.read_bytes() for path in under.rglob("*") if path.is_file()}
