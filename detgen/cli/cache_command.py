"""`detgen cache`: show or prune the completion cache, by `detgen.cache`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.declared import DONE, FAILED, command, epilog, parser
from detgen.engine.config import parse_size

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

INFO_EPILOG = epilog(
    "detgen cache info",
    "detgen cache info --check /data/completions",
    status="0 shown, 1 shown, but completions are damaged (--check), 2 refused",
)
PRUNE_EPILOG = epilog(
    "detgen cache prune", "detgen cache prune --older-than 30d --max-size 2GB", status="0 done, 2 refused"
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(text: str) -> float:
    """Return the seconds of `30d`, `12h`, `1.5w`, `90m` or `10s`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 30d, 12h or 2w (s, m, h, d, w)")
    return float(match[1]) * _SECONDS[match[2]]


Folder = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", show_default="the one of --cache auto", help="The folder of the cache."),
]


def group() -> None:
    """Show or prune the completion cache, which `detgen run --cache` fills."""


@command
def info_command(
    folder: Folder = None,
    check: Annotated[bool, typer.Option("--check", help="Read every completion and check that it is whole.")] = False,
    *,
    display: QuietDisplay,
) -> int:
    """Show what a completion cache holds: how much, of which models, and when it was used."""
    with display:
        from detgen.cache import open_store
        from detgen.cache.cache_folder import contents

        if check:
            display.stage("reading the completions")
        with open_store(folder) as store:
            found = contents(store, check=check)
    from detgen.show.answers import show_contents

    if found.damaged or not display.quiet:
        show_contents(store.path, found)
    return FAILED if found.damaged else DONE


@command
def prune_command(
    folder: Folder = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=parse_age,
            metavar="AGE",
            show_default=False,
            help="Remove completions that have not been used for this long, such as 30d, 12h or 2w.",
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            parser=parser(parse_size),
            metavar="SIZE",
            show_default=False,
            help="Remove the least recently used completions until the file is no larger than SIZE, such as 2GB.",
        ),
    ] = None,
    *,
    display: QuietDisplay,
) -> int:
    """Remove completions from a cache, and give their space back. Runs may use the cache meanwhile.

    Without options, only what is damaged or was made by another version of detgen is removed.
    """
    with display:
        from detgen.cache import open_store
        from detgen.cache.cache_folder import prune

        display.stage("removing completions")
        with open_store(folder) as store:
            pruned = prune(store, older_than=older_than, max_size=max_size)
    from detgen.show.answers import show_pruned

    if not display.quiet:
        show_pruned(store.path, pruned)
    return DONE


COMMANDS = {"info": (info_command, INFO_EPILOG), "prune": (prune_command, PRUNE_EPILOG)}
