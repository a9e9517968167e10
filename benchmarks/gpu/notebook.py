"""Results of a stage, written to the disk at once, since the process may be ended at any moment."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """What a stage is asked to do.

    Attributes:
        stage: name of the stage.
        model: configuration that gives the models' shapes, as for `detgen bench --random-weights`.
        tiny: whether to run small shapes on the CPU, to try the stage itself.
    """

    stage: str
    model: str
    tiny: bool

    @property
    def device(self) -> str:
        """The device to run on."""
        return "cpu" if self.tiny else "cuda"


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


class Notebook:
    """The results of a stage.

    Args:
        path: path of a JSON file: `found` by name, `lines` for people to read, `failed` parts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        self._lines: list[str] = []
        self.failed: list[str] = []
        self._write()

    def note(self, name: str, value: Any, line: str | None = None) -> None:
        """Record a value for JSON, and a line about it."""
        self._found[name] = value
        self.say(*([] if line is None else [line]))

    def say(self, *lines: str) -> None:
        """Record lines."""
        self._lines += lines
        self._write()

    def compared(self, name: str, different: int, numbers: int, right: str) -> None:
        """Record how many numbers of a result differ from what they should be, and fail if any does."""
        said = f"OTHER BITS, {different} of {numbers} numbers" if different else right
        self.note(name, {"equal": not different, "different": different}, f"{name}: {said}")
        assert not different, said

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the block; an error in it ends the block and not the stage."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            self.failed.append(f"{name}: {type(error).__name__}: {first}"[:300])
            self._write()
            sys.stderr.flush()

    def _write(self) -> None:
        found = {"found": self._found, "lines": self._lines, "failed": self.failed}
        write(self._path, json.dumps(found) + "\n")
