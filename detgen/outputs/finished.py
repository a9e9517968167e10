"""Reads a run that exists: its prompts, and the lines of each prompt."""

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

_LONGEST = 300  # characters of an error to show


def prompts_of(folder: Path, manifest: dict[str, Any], given: str | None) -> Prompts:
    """Open the prompts of a run, without inspecting them.

    Args:
        folder: the output folder.
        manifest: the run's manifest.
        given: where the prompts are now; None for the place in the manifest.

    Raises:
        PromptsError: if there are none.
    """
    described = manifest["input"]
    if given is None and described["path"] == "-":
        return spooled_prompts(folder / SPOOL, described["prompt_column"])
    return open_prompts(given or input_place(folder, manifest), described["prompt_column"])


def input_place(folder: Path, manifest: dict[str, Any]) -> str:
    """Return the path of a run's prompts by its manifest; "-" if they were piped in.

    A relative path starts at the folder where the run was started or, if nothing is there, at the current folder.

    Args:
        folder: the output folder.
        manifest: the run's manifest.
    """
    described = manifest["input"]
    if "folder" in described:
        place = os.path.relpath(os.path.join(os.path.realpath(folder), described["folder"], described["path"]))
        if os.path.exists(place.partition("?")[0]):  # options of a dataset may follow
            return place
    return str(described["path"])


def items_of(manifest: dict[str, Any], prompts: Prompts) -> Iterator[Request | BadLine]:
    """Read the prompts of a run, inspected, with the run's defaults.

    Raises:
        PromptsError: if they cannot be read.
    """
    parameters = manifest["parameters"]
    seed_per_line, echo = (parameters[name] for name in ("seed_per_line", "echo"))
    return prompts.read(sampling_params(parameters), parameters["limit"], echo=echo, seed_per_line=seed_per_line)


def output_lines(file: BinaryIO, path: Path, sha256: str) -> Iterator[Line]:
    """Yield the lines of `outputs.jsonl` of a finished run.

    Args:
        file: the file, open at its beginning.
        path: its name in messages.
        sha256: its digest, as recorded by the run.

    Raises:
        OutputError: if a line is not one of a run or, after the last line, if the digest is different.
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
    """Yield each prompt with its lines, by sample.

    Raises:
        OutputError: if the lines belong to other prompts.
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
    """Return the first `count` errors of `outputs.jsonl`, shortened; none if the file cannot be read."""
    with suppress(OSError), open(open_plain(outputs), "rb") as file:
        lines = (parse_line(raw) for raw in file if b'"error":' in raw)
        errors = islice((line["error"] for line in lines if line is not None and "error" in line), count)
        return [error if len(error) <= _LONGEST else f"{error[:_LONGEST]}..." for error in errors]
    return []
