"""An acceptance log that is compressed, and reading one without knowing whether it is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from detgen.prompts.files import zst_blocks

COMPRESSED = ".zst"
_LEVEL = 3
_BLOCK = 4 << 20  # bytes that are given out at a time


class DamagedError(ValueError):
    """A compressed file is damaged."""


class TornError(DamagedError):
    """A compressed file ends in the middle, as that of a run that was killed may."""


def frame_of(data: bytes) -> bytes:
    """Bytes as a compressed frame with a checksum; frames one behind the other are a file."""
    import zstandard

    made: bytes = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
    return made


def contents(file: BinaryIO, name: str, see: Callable[[bytes], None] = lambda data: None) -> Iterator[bytes]:
    """What a file holds, in blocks; decompressed if its name says that it is compressed.

    Args:
        file: open for reading.
        name: its name.
        see: is given the file's own bytes, all of them if the blocks are read to the end or to the error.

    Raises:
        TornError, DamagedError: it is a compressed file that is not whole; what comes before that was given out.
    """
    source = _Seen(file, see)
    if not name.endswith(COMPRESSED):
        while data := source.read(_BLOCK):
            yield data
        return
    held = bytearray()
    fault: DamagedError | None = None
    blocks = zst_blocks(cast("BinaryIO", source), name)
    while fault is None:
        try:
            block = next(blocks, b"")
        except EOFError as error:
            fault = TornError(str(error))
        except zlib.error as error:
            fault = DamagedError(f"it is damaged ({error})")
        else:
            held += block
            if block and len(held) < _BLOCK:
                continue
            if not block:
                break
        if held:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)
    while source.read(_BLOCK):
        pass
    if fault is not None:
        raise fault


class _Seen:
    """A file whose bytes are shown to somebody on the way."""

    def __init__(self, file: BinaryIO, see: Callable[[bytes], None]) -> None:
        self._file, self._see = file, see

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data = self._file.read(size)
        self._see(data)
        return data
