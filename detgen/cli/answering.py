"""What commands share: the answer as an exit status and as JSON, and common arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detgen.cli.declared import DONE, FAILED, REFUSED

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay


def named(path: Path | None) -> Path | None:
    """Return the path of a file or folder to write; raise for `-`, which elsewhere is standard output."""
    if path == Path("-"):
        raise typer.BadParameter("'-' cannot be used here; nothing is written to standard output")
    return path


def writable(path: Path | None) -> Path | None:
    """Return the path of a file to write; raise before the work starts if it cannot be written."""
    path = named(path)
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"cannot write {path}: it is a folder")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"cannot write {path}: there is no folder {path.absolute().parent} to write to")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=writable,
        show_default=False,
        rich_help_panel="Input and output",
        help="Write the result as JSON.",
    ),
]
MovedPrompts = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPTS", show_default="where the manifest says", help="The run's prompts, if they have moved."
    ),
]


def import_engine(display: QuietDisplay) -> None:
    """Import the engine, after all checks that do not need it."""
    display.stage("loading the engine")
    from detgen.engine import Engine  # noqa: F401 (before its other modules: it defers Ctrl-C)


def answered(answer: dict[str, Any], json_file: Path | None, display: QuietDisplay) -> int:
    """Write the answer. Return the exit status: 0 if it is `equal`, else 1."""
    status = DONE if answer["equal"] else FAILED
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(answer, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        display.error(f"cannot write {json_file}: {error.strerror}")
        status = status or REFUSED
    return status
