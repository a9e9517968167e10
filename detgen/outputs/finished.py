"""A run that is there: its prompts, and the lines of each prompt."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

from detgen.engine.request import Request
from detgen.errors import OutputError
from detgen.outputs.directory import open_plain
from detgen.outputs.folder import OUTPUTS, SPOOL
from detgen.outputs.manifest_reading import sampling_params
from detgen.outputs.records import Line, parse_line
from detgen.prompts import BadLine, Prompts, open_prompts, spooled_prompts

_LONGEST = 300  # characters of an error that is shown


def prompts_of(folder: Path, manifest: dict[str, Any], given: str | None) -> Prompts:
    """The prompts of a run, not yet inspected.

    Args:
        folder: the output folder.
        manifest: the run's.
        given: where they are now; None is where the manifest says.

    Raises:
        PromptsError: there are none.
    """
    described = manifest["input"]
    if given is None and described["path"] == "-":
        return spooled_prompts(folder / SPOOL, described["prompt_column"])
    return open_prompts(given or input_place(folder, manifest), described["prompt_column"])


def input_place(folder: Path, manifest: dict[str, Any]) -> str:
    """Where the manifest says that the prompts of a run are; "-" if they were piped in.

    A relative path begins where the run did; if nothing is there, in the current folder.

    Args:
        folder: the output folder.
        manifest: the run's.
    """
    described = manifest["input"]
    if "folder" in described:
        place = os.path.relpath(os.path.join(os.path.realpath(folder), described["folder"], described["path"]))
        if os.path.exists(place.partition("?")[0]):  # behind it, options of a dataset
            return place
    return str(described["path"])


def items_of(manifest: dict[str, Any], prompts: Prompts) -> Iterator[Request | BadLine]:
    """The prompts of a run, inspected, with the run's defaults.

    Raises:
        PromptsError: they cannot be read.
    """
    parameters = manifest["parameters"]
    seed_per_line, echo = (parameters[name] for name in ("seed_per_line", "echo"))
    return prompts.read(sampling_params(parameters), parameters["limit"], echo=echo, seed_per_line=seed_per_line)


def output_lines(file: BinaryIO, path: Path, sha256: str) -> Iterator[Line]:
    """The lines of `outputs.jsonl` of a finished run.

    Args:
        file: open at its beginning.
        path: what errors call it.
        sha256: its digest, as the run has it.

    Raises:
        OutputError: it holds something else, or (behind the last line) is not what the run wrote.
    """
    digest = hashlib.sha256()
    for number, raw in enumerate(file, 1):
        digest.update(raw)
        if (line := parse_line(raw)) is None:
            raise OutputError(f"{path}:{number} is not a line of a run; restore the file, or run again")
        yield line
    if digest.hexdigest() != sha256:
        raise OutputError(f"{path} is not what the run wrote: its SHA-256 is different; restore the file, or run again")


def beside(items: Iterable[Request | BadLine], lines: Iterable[Line]) -> Iterator[tuple[Request | BadLine, list[Line]]]:
    """Each prompt with its lines, by sample.

    Raises:
        OutputError: the lines are those of other prompts.
    """
    groups = groupby(lines, key=lambda line: line["index"])
    for item in items:
        index, own = next(groups, (None, ()))
        found = list(own)
        if index != item.index or found[0].get("id") != item.id:
            raise OutputError(f"{OUTPUTS} has no line of prompt {item.index + 1}: the prompts are not those of the run")
        yield item, found
    if next(groups, None) is not None:
        raise OutputError(f"{OUTPUTS} has lines after the last prompt: the prompts are not those of the run")


def first_errors(outputs: Path, count: int) -> list[str]:
    """The first `count` errors of `outputs.jsonl`, shortened; nothing if it cannot be read."""
    with suppress(OSError), open(open_plain(outputs), "rb") as file:
        lines = (parse_line(raw) for raw in file if b'"error":' in raw)
        errors = islice((line["error"] for line in lines if line is not None and "error" in line), count)
        return [error if len(error) <= _LONGEST else f"{error[:_LONGEST]}..." for error in errors]
    return []
