"""What a stage finds, on the disk as soon as it is found: the process may be ended at any moment."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """What every stage is asked.

    Attributes:
        stage: its name.
        model: the configuration whose shape models have, as `detgen bench --random-weights` takes it.
        tiny: run small shapes on the CPU, to try the stage itself.
    """

    stage: str
    model: str
    tiny: bool

    @property
    def device(self) -> str:
        """Where to run."""
        return "cpu" if self.tiny else "cuda"


def write(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


class Notebook:
    """What was found.

    Args:
        path: a JSON file: `found` by name, `lines` for a person to read, `failed` parts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        self._lines: list[str] = []
        self.failed: list[str] = []
        self._write()

    def note(self, name: str, value: Any, line: str | None = None) -> None:
        """Keep a value that JSON knows, and a line about it."""
        self._found[name] = value
        self.say(*([] if line is None else [line]))

    def say(self, *lines: str) -> None:
        """Keep lines."""
        self._lines += lines
        self._write()

    def compared(self, name: str, different: int, numbers: int, right: str) -> None:
        """Keep how many of the numbers of a result differ from what they should be, and fail if any does."""
        said = f"OTHER BITS, {different} of {numbers} numbers" if different else right
        self.note(name, {"equal": not different, "different": different}, f"{name}: {said}")
        assert not different, said

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What fails inside the block ends the block and not the stage."""
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
