"""`detgen schema`: the JSON Schema of an input line, for editors and other programs."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

EPILOG = "Example: [bold]detgen schema prompts > prompts.schema.json[/]"


def schema_command(
    lines: Annotated[
        Literal["prompts", "scores"],
        typer.Argument(
            metavar="prompts|scores", show_default=False, help="The lines that detgen run reads, or detgen score."
        ),
    ],
) -> None:
    """Print the JSON Schema of an input line: its keys, their types and what they mean."""
    from detgen.prompts.schema import prompt_schema, score_schema

    found = prompt_schema() if lines == "prompts" else score_schema()
    typer.echo(json.dumps(found, indent=2))


COMMANDS = {"schema": (schema_command, EPILOG)}
