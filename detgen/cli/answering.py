"""What the commands that answer yes or no share: errors and answers as exit codes, and the answer as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detgen.cli import options

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay


def writable(path: Path | None) -> Path | None:
    """A file that can be written; said before the work, not after it."""
    path = options.named(path)
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
        rich_help_panel="Results",
        help="Write the result as JSON.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel="Results", help="Show no progress.")]


@contextmanager
def errors_shown(display: QuietDisplay) -> Iterator[None]:
    """Show what goes wrong inside, and exit.

    Raises:
        typer.Exit: with the status.
    """
    from detgen.errors import CheckError, EngineError, OutputError, PromptsError, RequestError, StoreError
    from detgen.failing import limit_reached
    from detgen.worker import WorkerError

    try:
        yield
    except (CheckError, EngineError, OutputError, PromptsError, RequestError, StoreError, WorkerError) as error:
        display.error(options.as_typed(error))
        raise typer.Exit(options.REFUSED) from None
    except OSError as error:
        display.error(limit_reached(error) or f"cannot write {error.filename or 'the result'}: {error.strerror}")
        raise typer.Exit(options.REFUSED) from None
    except KeyboardInterrupt:
        display.notice("interrupted; nothing was concluded")
        raise typer.Exit(options.INTERRUPTED) from None


def load_torch(display: QuietDisplay) -> None:
    """Import what takes seconds, once nothing that can be seen without it stands in the way."""
    display.stage("loading PyTorch")
    from detgen.engine import Engine  # noqa: F401 (before other modules that import torch: it holds Ctrl-C back)


def conclude(answer: dict[str, Any], json_file: Path | None, display: QuietDisplay) -> None:
    """Write the answer and exit: 0 if it is `equal`, else 1.

    Raises:
        typer.Exit: with the status.
    """
    status = 0 if answer["equal"] else options.FAILED
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(answer, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        display.error(f"cannot write {json_file}: {error.strerror}")
        status = status or options.REFUSED
    raise typer.Exit(status)
