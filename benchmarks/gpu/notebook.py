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
        if line is not None:
            self._lines.append(line)
        self._write()

    def say(self, line: str) -> None:
        """Keep a line."""
        self._lines.append(line)
        self._write()

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
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found) + "\n", encoding="utf-8")
        new.replace(self._path)
