"""`detgen export`: a finished run in another format, by `detgen.export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.answering import MovedPrompts, named
from detgen.cli.declared import DONE, command, epilog
from detgen.export import Form

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = epilog(
    "detgen export out --to parquet",
    "detgen export out --to csv -o texts.csv",
    "detgen export out moved/batch.jsonl --to openai -o results.jsonl",
    status="0 done, 2 refused",
)


@command
def export_command(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", show_default=False, help="The output folder of a finished run.")
    ],
    to: Annotated[
        Form,
        typer.Option(
            metavar="csv|parquet|openai|hf",
            show_default=False,
            help="csv, parquet and hf (a folder for load_from_disk) are tables with a row per sample; openai has a line"
            " per request, as the OpenAI batch API writes it.",
        ),
    ],
    prompts: MovedPrompts = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=named,
            metavar="FILE",
            show_default="named after OUT",
            help="The file to write (with hf, a folder). It must not exist.",
        ),
    ] = None,
    *,
    display: QuietDisplay,
) -> int:
    """Write a finished run as a table, or as results of the OpenAI batch API. OUT stays as it is.

    Prompts stand beside the texts if they are still where the run read them, or where PROMPTS says.
    """
    with display:
        from detgen.export.exporting import export_run

        exported = export_run(out, to, prompts, output, display)
    from detgen.show.answers import show_export

    if not display.quiet:
        show_export(exported)
    return DONE


COMMANDS = {"export": (export_command, EPILOG)}
