"""`detgen models`: the models on this machine and their memory needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.declared import DONE, FAILED, command, epilog

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = epilog(
    *("detgen models", "detgen models models/large model.gguf", "detgen models --families"),
    status="0 shown, 1 one cannot be loaded",
)


@command
def models_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            show_default="the embedded ones and those in the hub's cache",
            help="Folders, GGUF files, folders of them, or names on the hub.",
        ),
    ] = None,
    families: Annotated[
        bool,
        typer.Option("--families", help="List the model types of transformers instead, and how each of them runs."),
    ] = False,
    *,
    display: QuietDisplay,
) -> int:
    """List models, and what their weights and a thousand tokens of context take in memory.

    Only the headers of files are read, and nothing is loaded or fetched.
    """
    from detgen.models.known import known_models, tried_families
    from detgen.show.answers import show_families, show_models

    if families:
        if models:
            raise typer.BadParameter("leave out the models: --families lists those of transformers")
        if not display.quiet:
            show_families(*tried_families())
        return DONE
    found = list(known_models(models or []))
    if not display.quiet:
        show_models(found)
    return FAILED if any(model.error for model in found) else DONE


COMMANDS = {"models": (models_command, EPILOG)}
