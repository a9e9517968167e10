"""`detgen schema`: the form of an input line, for editors and other programs."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

EPILOG = "Example: [bold]detgen schema prompts > prompts.schema.json[/]"


class Lines(StrEnum):
    """What lines there is a schema of."""

    PROMPTS = "prompts"
    SCORES = "scores"


def schema_command(
    lines: Annotated[
        Lines,
        typer.Argument(
            metavar="prompts|scores", show_default=False, help="The lines that detgen run reads, or detgen score."
        ),
    ],
) -> None:
    """Print the JSON Schema of an input line: its keys, their types and what they mean."""
    from detgen.prompts.schema import prompt_schema, score_schema

    found = prompt_schema() if lines is Lines.PROMPTS else score_schema()
    typer.echo(json.dumps(found, indent=2))
