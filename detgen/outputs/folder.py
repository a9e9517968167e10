"""The output folder: its lock, its manifest, and the check that it belongs to detgen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from detgen.errors import OutputError
from detgen.outputs.directory import Directory, FolderLostError, Hold, digest, make_folder, write_all, writing
from detgen.outputs.manifest import LOGS, RESULTS, log_name
from detgen.outputs.manifest_reading import parse_manifest
from detgen.outputs.store import STORE, beside

_ELSEWHERE = "choose another folder with -o"

OUTPUTS, ACCEPTANCE, SPOOL = "outputs.jsonl", "acceptance.jsonl", "stdin.jsonl"
ASIDE = "samples-damaged.sqlite3"  # a store that was found damaged and is not trusted
MANIFEST, _CRASH = "manifest.json", "detgen-error.log"
_DRAFT_SPOOL, DRAFT_STORE = f"{SPOOL}.tmp", f"{STORE}.tmp"
_STORES = tuple(file for name in (ASIDE, STORE, DRAFT_STORE) for file in (*beside(name), name))
_LOGS = tuple(filter(None, LOGS.values()))
_FILES = (OUTPUTS, *_LOGS, RESULTS, *_STORES, SPOOL, _CRASH, MANIFEST)
_DRAFTS = (_DRAFT_SPOOL, *(f"{name}.tmp" for name in (MANIFEST, RESULTS, _CRASH)))  # left by a crash


class OutputFolder:
    """A folder that holds one run, or nothing yet; `with` creates and locks it.

    Its files are accessed through its descriptor: a renamed folder is still the same one, and what another run puts in
    its place is never touched.

    Args:
        path: path of the folder.
        say: receives messages about it.

    Attributes:
        path: present path of the folder.
        directory: access to its files.
        latest: the manifest as last written while the run is not finished.

    Raises:
        OutputError: by every method that changes a file, on failure.
    """

    directory: Directory

    def __init__(self, path: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._say = say
        self._hold: Hold
        self._made = False
        self.latest = b""

    @property
    def outputs(self) -> Path:
        """Path of the output lines."""
        return self.path / OUTPUTS

    @property
    def acceptance(self) -> Path:
        """Path of the acceptance log."""
        return self.path / ACCEPTANCE

    @property
    def store(self) -> Path:
        """Path of the store of samples."""
        return self.path / STORE

    @property
    def spool(self) -> Path:
        """Path of prompts that were piped in."""
        return self.path / SPOOL

    def __enter__(self) -> OutputFolder:
        """Create and lock the folder.

        Raises:
            OutputError: if it cannot be created, another run is writing to it, or it holds something other than a run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file, not a folder; {_ELSEWHERE}")
        try:
            self._take()
        except BlockingIOError:
            raise OutputError(f"another run is writing to {self.path}; wait for it, or {_ELSEWHERE}") from None
        except OSError as error:
            raise OutputError(f"cannot use the folder {self.path}: {error.strerror}; {_ELSEWHERE}") from error
        try:
            self._check_ours()
        except OutputError:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock the folder; remove it if this run created it and wrote nothing."""
        self._release()

    def _take(self) -> None:
        while True:
            self._made = make_folder(self.path)
            with suppress(FileNotFoundError):  # a run that is ending may remove the folder meanwhile: then try again
                self.directory = Directory(self.path)
                try:
                    self._hold = Hold(self.directory, self.path)
                    return
                except (OSError, OutputError):
                    self.directory.close()
                    raise

    def _release(self) -> None:
        # A file that cannot be removed does no harm: a lock ends with its process.
        with suppress(OSError):
            if self._hold.lost() is None:
                self.directory.remove(_DRAFT_SPOOL)
                self._hold.release()
                if self._made and self.directory.place() == self.path:
                    self.path.rmdir()  # fails unless it is empty
        self._hold.close()
        self.directory.close()

    def check(self) -> None:
        """Check that the folder still belongs to this run; call it before each change of its files.

        A renamed folder still belongs to the run, which continues under the new name.

        Raises:
            FolderLostError: if the folder or its lock was deleted.
        """
        if (lost := self._hold.lost()) is not None:
            raise FolderLostError(lost)
        place = self.directory.place()
        if place is not None and place != self.path:
            self._say(
                f"{self.path} was renamed to {place} while the run used it; the run goes on there"
                f" (should it be interrupted, resume it with -o {place})"
            )
            self.path = place
            self._hold.path = place

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest of the run in the folder; None if there is none.

        Raises:
            OutputError: if there is a manifest that is not detgen's.
        """
        place = self.path / MANIFEST
        try:
            with self.directory.reader(MANIFEST) as file:
                return parse_manifest(file.read(), place)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"cannot read {place}: {error.strerror}; {_ELSEWHERE}") from error

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest."""
        data = json.dumps(manifest, indent=2).encode() + b"\n"
        if manifest["status"] != "finished":
            self.latest = data
        self.check()
        with writing(self.path / MANIFEST):
            self.directory.write(MANIFEST, data)

    def keep_manifest(self) -> None:
        """Write the manifest of the running run again if it was deleted."""
        if self.latest and not self.directory.has(MANIFEST):
            self._say(f"{self.path / MANIFEST} was deleted while the run used it; it is written again")
            with writing(self.path / MANIFEST):
                self.directory.write(MANIFEST, self.latest)

    def clear(self) -> None:
        """Delete what an earlier run wrote, and nothing else."""
        self.check()
        # The manifest comes last: it marks the other files as detgen's if a crash leaves some of them.
        for name in _FILES:
            with writing(self.path / name):
                self.directory.remove(name)

    def drop_former(self, manifest: dict[str, Any], *, piped: bool) -> None:
        """Delete those files of an earlier run that this one will not replace.

        Args:
            manifest: this run's manifest.
            piped: whether its prompts were piped in.
        """
        logs = (name for name in _LOGS if name != log_name(manifest))
        self.drop_drafts()
        with writing(self.path):
            for name in (*logs, RESULTS, _CRASH, *(() if piped else (SPOOL,))):
                self.directory.remove(name)

    def drop_drafts(self) -> None:
        """Delete unfinished replacements of files, which a crash may leave."""
        self.check()
        with writing(self.path):
            for name in _DRAFTS:
                self.directory.remove(name)

    def has_intact(self, name: str, sha256: str) -> bool:
        """Return whether the folder has a file of this name and content."""
        with suppress(OSError), self.directory.reader(name) as file:
            return digest(file.fileno()) == sha256
        return False

    def check_finished(self, manifest: dict[str, Any]) -> None:
        """Check that the files of a finished run are unchanged.

        Raises:
            OutputError: if they are not.
        """
        for name in (n for n in manifest["files"] if n != RESULTS):  # results can be made again from the others
            reason = None
            try:
                with self.directory.reader(name) as file:
                    if digest(file.fileno()) != manifest["files"][name]["sha256"]:
                        reason = "was changed after the run had finished"
            except FileNotFoundError:
                reason = "was deleted after the run had finished"
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
            if reason is not None:
                raise OutputError(f"{self.path / name} {reason}; start over with --overwrite, or {_ELSEWHERE}")

    def receive(self, stream: BinaryIO) -> Path | None:
        """Store a stream until the folder is closed; return its path, or None if it is empty."""
        with writing(self.path / _DRAFT_SPOOL):
            file = self.directory.create(_DRAFT_SPOOL)
            try:
                while block := stream.read(1 << 20):
                    write_all(file, block)
                received = os.fstat(file).st_size
                os.fsync(file)
            finally:
                os.close(file)
            if not received:
                self.directory.remove(_DRAFT_SPOOL)
        return self.path / _DRAFT_SPOOL if received else None

    def keep_received(self) -> Path:
        """Keep the stored stream as the input of this run, and return its path."""
        if self.directory.has(_DRAFT_SPOOL):
            self.check()
            with writing(self.spool):
                self.directory.replace(_DRAFT_SPOOL, SPOOL)
        return self.spool

    def kept(self) -> Path | None:
        """Return the path of the stream that an earlier run stored; None if there is none.

        Raises:
            OutputError: if something else has its name.
        """
        try:
            os.close(self.directory.open(SPOOL))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"cannot read {self.spool}: {error.strerror}; {_ELSEWHERE}") from error
        return self.spool

    def note_crash(self, text: str) -> Path | None:
        """Save the traceback of an internal error; return its path, or None if it cannot be saved."""
        with suppress(OSError, OutputError):
            self.check()
            self.directory.write(_CRASH, text.encode("utf-8", "backslashreplace"))
            return self.path / _CRASH
        return None

    def _check_ours(self) -> None:
        for name in (*_FILES, *_DRAFTS):
            try:
                self.directory.check(name)
            except OSError as error:
                raise OutputError(f"cannot use {self.path}: {error.strerror}; remove it, or {_ELSEWHERE}") from error
        if self.manifest() is not None:
            return
        early = {Hold.NAME, _CRASH, *_DRAFTS}  # these may precede the manifest
        foreign = sorted(set(self.directory.names()) - early)
        if foreign:
            names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise OutputError(f"{self.path} holds files that are not of a detgen run ({names}); {_ELSEWHERE}")
