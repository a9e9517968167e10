"""Standard streams whose failure never ends a command. Imports nothing of detgen."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Forgiving:
    """A stream that falls silent once it cannot be written, such as on a full disk.

    The command goes on: its results are in its files and its exit status.

    Attributes:
        failure: why it fell silent; None as long as it has not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, or drop it if the stream has failed."""
        with self._silenced():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it if the stream has failed."""
        with self._silenced():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            with suppress(OSError):  # what is still buffered is written when the process ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def forgiving_streams() -> Iterator[None]:
    """Make the standard streams forgiving inside the block; report at its end if standard output was cut off."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file opened would get its number, and what libraries print
            os.open(os.devnull, os.O_RDWR)
    former = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, Forgiving(stream))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        failure = getattr(sys.stdout, "failure", None)
        if failure is not None and failure.errno != errno.EPIPE and sys.stderr is not None:
            sys.stderr.write(f"detgen: error: cannot write to standard output: {failure.strerror}\n")
        sys.stdout, sys.stderr = former
