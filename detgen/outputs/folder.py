"""The output folder: its lock, its manifest, and the check that it belongs to detgen."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from detgen.errors import OutputError
from detgen.outputs.base import new_file, sync_folder, write_all, write_atomically, writing

_ELSEWHERE = "choose another folder with -o"
_KEYS = {"detgen", "status", "input", "parameters"}
_INPUT_KEYS = {"path", "format", "sha256"}


class OutputFolder:
    """A folder that holds one run, or nothing yet; `with` creates and locks it.

    Raises:
        OutputError: by every method that changes a file, if it cannot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outputs = path / "outputs.jsonl"
        self.acceptance = path / "acceptance.jsonl"
        self.journal = path / "journal.jsonl"
        self.spool = path / "stdin.jsonl"
        self._draft_spool = path / "stdin.jsonl.tmp"
        self._manifest = path / "manifest.json"
        self._lock_file = path / ".lock"
        self._made = False
        self._lock = -1

    def __enter__(self) -> OutputFolder:
        """Create and lock the folder.

        Raises:
            OutputError: it cannot be created, another run is writing to it, or it holds something other than a run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file, not a folder; {_ELSEWHERE}")
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise OutputError(f"cannot use the folder {self.path}: {error.strerror}; {_ELSEWHERE}") from None
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
        self._draft_spool.unlink(missing_ok=True)
        self._release()

    def _take_lock(self) -> int:
        # A separate file, since not every file system can lock a folder. Unlocking deletes it, so the file that was
        # locked may be gone by now: then try again with a new one.
        while True:
            file = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._lock_file.exists() and os.path.samestat(self._lock_file.stat(), os.fstat(file)):
                    return file
                os.close(file)
            except BlockingIOError:
                os.close(file)
                raise OutputError(f"another run is writing to {self.path}; wait for it, or {_ELSEWHERE}") from None

    def _release(self) -> None:
        self._lock_file.unlink(missing_ok=True)
        os.close(self._lock)
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the run that the folder holds; None if it holds none.

        Raises:
            OutputError: there is a manifest, but not one of detgen's.
        """
        try:
            manifest: dict[str, Any] = json.loads(self._manifest.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise OutputError(f"cannot read {self._manifest}: {error}; {_ELSEWHERE}") from None
        described = manifest.get("input") if isinstance(manifest, dict) and manifest.keys() >= _KEYS else None
        if not isinstance(described, dict) or not described.keys() >= _INPUT_KEYS:
            raise OutputError(f"{self._manifest} is not a manifest of detgen; {_ELSEWHERE}")
        return manifest

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest."""
        write_atomically(self._manifest, json.dumps(manifest, indent=2).encode() + b"\n")

    def clear(self) -> None:
        """Delete what an earlier run wrote, and nothing else."""
        # The manifest last: it marks the other files as detgen's if a crash leaves some of them.
        for path in (self.outputs, self.acceptance, self.journal, self.spool, self._manifest):
            with writing(path):
                path.unlink(missing_ok=True)

    def remove_journal(self) -> None:
        """Delete the journal of a finished run."""
        with writing(self.journal):
            self.journal.unlink(missing_ok=True)
            sync_folder(self.path)

    def check_finished(self, manifest: dict[str, Any]) -> None:
        """Check that a finished run's files are still what it wrote.

        Raises:
            OutputError: they are not.
        """
        for path in (self.outputs, self.acceptance):
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:
                found = None
            if found != manifest["files"][path.name]["sha256"]:
                raise OutputError(
                    f"{path} was {'changed' if found else 'deleted'} after the run had finished;"
                    f" start over with --overwrite, or {_ELSEWHERE}"
                )

    def receive(self, stream: BinaryIO) -> Path | None:
        """Store a stream until the folder is closed; None if it is empty."""
        with writing(self._draft_spool):
            with new_file(self._draft_spool) as file:
                while block := stream.read(1 << 20):
                    write_all(file, block)
                received = os.fstat(file).st_size
            if not received:
                self._draft_spool.unlink()
        return self._draft_spool if received else None

    def keep_received(self) -> Path:
        """Keep the stored stream as the input of this run."""
        if self._draft_spool.exists():
            with writing(self.spool):
                self._draft_spool.replace(self.spool)
                sync_folder(self.path)
        return self.spool

    def _check_ours(self) -> None:
        if self.manifest() is not None:
            return
        early = {self._lock_file.name, self._draft_spool.name, f"{self._manifest.name}.tmp"}  # older than the manifest
        foreign = sorted({p.name for p in self.path.iterdir()} - early)
        if foreign:
            names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise OutputError(f"{self.path} holds files that are not of a detgen run ({names}); {_ELSEWHERE}")
