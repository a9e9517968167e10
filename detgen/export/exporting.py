"""Export a finished output folder to a file in another form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from detgen.errors import OutputError, PromptsError
from detgen.export import FORMS, Form
from detgen.export.tables import placed, row_of, write_table
from detgen.outputs import open_plain, read_manifest_of_texts
from detgen.outputs.batch_results import result_lines
from detgen.outputs.finished import beside, items_of, output_lines, prompts_of
from detgen.outputs.folder import OUTPUTS
from detgen.progress import Observer
from detgen.prompts import Prompts

_ELSEWHERE = "choose another place with -o"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        path: the file or folder.
        count: number of lines or rows.
        unit: what is counted.
    """

    path: Path
    count: int
    unit: Literal["result", "row"]


def export_run(folder: Path, form: Form, prompts: str | None, output: Path | None, observer: Observer) -> Exported:
    """Convert a finished run to another format. The folder stays as it is.

    Args:
        folder: the output folder.
        form: one of `FORMS`; csv, parquet and hf (a dataset on the disk) are tables, openai has results as the batch
            API writes them.
        prompts: where the run's prompts are now; None takes the place that the manifest names.
        output: the file, or the folder of a dataset; None names it after the folder, in the current one.
        observer: receives messages.

    Raises:
        OutputError: if the folder holds no finished run, or the output exists or cannot be placed there.
        PromptsError: if the prompts are needed and cannot be read.
        OSError: if the file cannot be written.
    """
    manifest = read_manifest_of_texts(folder)
    if manifest["status"] != "finished":
        raise OutputError(
            f"{folder} holds a run that is not finished (its status is {manifest['status']}); give the command of the"
            " run again to finish it, then export"
        )
    path = output if output is not None else Path(f"{folder.resolve().name}{FORMS[form]}")
    _check_free(path, folder)
    source = _prompts(folder, manifest, prompts, observer, needed=form == "openai")
    observer.stage(f"writing {path}")
    try:
        file = open(open_plain(folder / OUTPUTS), "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise OutputError(f"cannot read {folder / OUTPUTS}: {error.strerror}; restore the file, or run again") from None
    with file:
        if form != "openai":
            rows = _rows(file, folder, manifest, source)
            count = write_table(rows, form, path, manifest["files"][OUTPUTS]["sha256"][:16])
            return Exported(path, count, "row")
        assert source is not None
        return Exported(path, _write_results(file, folder, manifest, source, path), "result")


def _check_free(path: Path, folder: Path) -> None:
    """Raise if a path exists, has no parent folder, or is in the output folder."""
    if path.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"{path} is in the output folder, which export leaves as it is; {_ELSEWHERE}")
    if os.path.lexists(path):
        raise OutputError(f"{path} exists already; remove it, or {_ELSEWHERE}")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}; {_ELSEWHERE}")


def _prompts(
    folder: Path, manifest: dict[str, Any], given: str | None, observer: Observer, *, needed: bool
) -> Prompts | None:
    """Return the run's prompts; None if they are neither available nor needed."""
    observer.stage("reading the prompts")
    try:
        prompts = prompts_of(folder, manifest, given)
        if prompts.inspect().sha256 != manifest["input"]["sha256"]:
            raise PromptsError(f"{prompts.given} is not what the run read: its SHA-256 is different")
    except PromptsError as error:
        if needed or given is not None:
            raise PromptsError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None
        observer.message(f"prompts are left out where outputs.jsonl has none: {error}; name them as PROMPTS")
        return None
    return prompts


def _rows(file: BinaryIO, folder: Path, manifest: dict[str, Any], source: Prompts | None) -> Iterator[dict[str, Any]]:
    lines = output_lines(file, folder / OUTPUTS, manifest["files"][OUTPUTS]["sha256"])
    if source is None:
        yield from (row_of(line, None) for line in lines)
        return
    for item, own in beside(items_of(manifest, source), lines):
        yield from (row_of(line, item) for line in own)


def _write_results(file: BinaryIO, folder: Path, manifest: dict[str, Any], source: Prompts, path: Path) -> int:
    lines = output_lines(file, folder / OUTPUTS, manifest["files"][OUTPUTS]["sha256"])
    results = result_lines(manifest["profile"], items_of(manifest, source), lines)
    count = 0
    with placed(path) as made, made.open("wb") as written:
        for line in results:
            written.write(line)
            count += 1
    return count
