"""`detgen report`: a page about an existing run, by `detgen.report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.answering import writable
from detgen.cli.declared import DONE, FAILED, command, epilog

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = epilog(
    "detgen report out",
    "detgen report out -o out.html --request add --request 17",
    "detgen report out --against other-out",
    status="0 written, 1 written, but a folder is not as its run wrote it, 2 refused",
)


@command
def report_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The output folder of a run.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="OTHER", show_default=False, help="Show what differs from another output folder."),
    ] = None,
    request: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            show_default="a few, by rules that the page names",
            help="Show this request window by window; may be given several times.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", callback=writable, help="Where to write the page."),
    ] = Path("report.html"),
    *,
    display: QuietDisplay,
) -> int:
    """Draw what a run did on one page of HTML: what was drafted, accepted, corrected and rolled back, and why.

    The page is a single file without scripts, made from the files of the folder; for the texts of tokens it needs the
    tokenizer of the run's model. Margins show where another profile would differ first.
    """
    from detgen.report.reporting import read_report

    with display:
        display.stage(f"reading {out}")
        from detgen.report.page import check_place, write

        check_place(output)
        report = read_report(out, request or (), against)
        display.stage("writing the page")
        size = write(report, output)
    from detgen.show.answers import show_report

    if report.faults.count or not display.quiet:
        show_report(report, output, size)
    return FAILED if report.faults.count else DONE


COMMANDS = {"report": (report_command, EPILOG)}
