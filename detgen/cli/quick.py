"""Quick use: prompts from the command line or a pipe, and lines or texts on standard output instead of a folder."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO, cast

from detgen.errors import RunError
from detgen.run import RunConfig, ScoreConfig

if TYPE_CHECKING:
    from detgen.progress import Progress
    from detgen.show.progress_view import QuietDisplay

_LONGEST = 64 << 20  # bytes of a plain text, as for a line
_BLOCK = 1 << 16
_PACKED = ((b"\x1f\x8b", "zcat"), (b"\x28\xb5\x2f\xfd", "zstdcat"))  # first bytes of gzip and zstandard files


class ReaderLeftError(KeyboardInterrupt):
    """The reader of standard output has closed it, so the rest need not be done."""


def quick(config: RunConfig, prompts: Sequence[str], say: Callable[[str], None]) -> tuple[RunConfig, bool]:
    """Return the configuration with prompts from `--prompt` or piped plain text, and whether to print only their texts.

    Args:
        config: the configuration so far.
        prompts: the prompts of `--prompt`.
        say: receives a message if several lines of standard input are one prompt.

    Raises:
        RunError: if prompts are given twice, or the piped input cannot be a prompt.
    """
    if prompts and config.prompts != "-":
        raise RunError("PROMPTS and --prompt cannot be given together; leave one of them out")
    if not prompts:
        if config.prompts != "-" or (stream := _piped()) is None:
            return config, False
        if not (beginning := _beginning(stream)):
            return config, False
        if beginning.lstrip(_BLANK)[:1] in (b"", b"{", b"["):  # blank, or JSON lines
            return replace(config, piped=cast("BinaryIO", _Joined(beginning, stream))), False
        prompts = [_plain_text(beginning, stream)]
        if count := prompts[0].count("\n"):
            say(f"standard input is plain text, and its {count + 1:,} lines are one prompt; a .txt file has one a line")
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    return replace(config, piped=io.BytesIO(lines.encode())), config.output is None


_BLANK = b" \t\r\n\f\v\xef\xbb\xbf"  # including the bytes of a byte order mark


def _piped() -> BinaryIO | None:
    return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer


def _beginning(stream: BinaryIO) -> bytes:
    """Read the beginning of a stream, up to a block that is not blank, or all of it."""
    blocks = []
    while block := stream.read1(_BLOCK):  # type: ignore[attr-defined]
        blocks.append(block)
        if block.strip(_BLANK):
            break
    return b"".join(blocks)


class _Joined:
    """A stream whose beginning has already been read."""

    def __init__(self, beginning: bytes, rest: BinaryIO) -> None:
        self._beginning, self._rest = beginning, rest

    def read(self, size: int) -> bytes:
        """Read up to so many bytes; none at the end."""
        beginning, self._beginning = self._beginning[:size], self._beginning[size:]
        return beginning or self._rest.read(size)


def _plain_text(beginning: bytes, stream: BinaryIO) -> str:
    """Read all of a stream as one prompt, without the line break that `echo` and editors put at the end."""
    data = beginning + stream.read(_LONGEST + 1 - len(beginning))
    if len(data) > _LONGEST:
        raise RunError("the plain text on standard input is longer than 64 MiB; pipe JSON lines, or name a file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = next((f"; decompress it first, with {cat}" for magic, cat in _PACKED if data.startswith(magic)), "")
        raise RunError(
            f"standard input is neither JSON lines nor plain text: not valid UTF-8 at byte {error.start + 1}{remedy}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def to_standard_output(
    config: RunConfig | ScoreConfig, display: QuietDisplay, *, bare: bool
) -> Iterator[tuple[RunConfig | ScoreConfig, Following]]:
    """Yield the configuration with a temporary folder, and the observer that prints its lines, or only texts if `bare`.

    Raises:
        RunError: if standard output is closed, or an option does not fit it.
    """
    if isinstance(config, RunConfig) and config.output_format != "jsonl":
        raise RunError("--output-format openai writes a file to a folder; name one with --output DIR")
    if isinstance(config, RunConfig) and config.show_thoughts and not bare:
        raise RunError("--show-thoughts writes to standard output, too; name a folder with --output DIR")
    if sys.stdout is None:
        raise RunError("standard output is closed; name a folder with --output DIR")
    with TemporaryDirectory(prefix="detgen-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "out"
        try:
            yield replace(config, output=folder), Following(display, folder / "outputs.jsonl", bare=bare)
        except Exception as error:
            if notes := getattr(error, "__notes__", None):
                notes.clear()  # they tell where the run is kept
            raise


class Following:
    """An `Observer` that copies the lines of a growing file to standard output, and shows everything else on a display.

    Args:
        display: shows progress and messages.
        path: path of the file.
        bare: whether to print only the texts of the lines.
    """

    def __init__(self, display: QuietDisplay, path: Path, *, bare: bool) -> None:
        self._display, self._path, self._bare = display, path, bare
        self._copied = 0
        self.message, self.stage = display.message, display.stage

    def progress(self, progress: Progress) -> None:
        """Copy new lines, and show the progress."""
        self.follow()
        self._display.progress(progress)

    def follow(self) -> None:
        """Copy all complete new lines.

        Raises:
            ReaderLeftError: if their reader has gone.
            RunError: if they cannot be written.
        """
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._copied)
            while block := file.read(1 << 20):
                whole = block[: block.rfind(b"\n") + 1] or self._line(block, file)
                if not whole:
                    return
                self._copied += len(whole)
                file.seek(self._copied)
                self._write("".join(map(_text_of, whole.splitlines())) if self._bare else whole)

    @staticmethod
    def _line(begun: bytes, file: BinaryIO) -> bytes:
        """Return a line that is longer than a block; empty if it is incomplete."""
        line = begun + file.readline()
        return line if line.endswith(b"\n") else b""

    def _write(self, data: bytes | str) -> None:
        if isinstance(data, str):
            from detgen.show.screen import plain_lines

            data = (plain_lines(data) if sys.stdout.isatty() else data).encode("utf-8", "surrogatepass")
        try:
            with self._display.aside(), open(sys.stdout.fileno(), "wb", closefd=False) as stream:
                stream.write(data)
        except BrokenPipeError:
            raise ReaderLeftError from None
        except OSError as error:
            raise RunError(f"cannot write to standard output: {error.strerror}") from None


def _text_of(line: bytes) -> str:
    """Return the text of an output line with a line break; "" for an error."""
    record = json.loads(line)
    text = record.get("prompt", "") + record["text"] if "text" in record else ""
    return text if text.endswith("\n") or not text else f"{text}\n"
