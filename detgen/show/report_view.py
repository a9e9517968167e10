"""What `detgen report` says when the page is written."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from detgen.report.reporting import Report
from detgen.report.words import counted
from detgen.show.screen import open_output, plain, size


def show_report(report: Report, path: Path, written: int) -> None:
    """What is wrong with the folder, then one line.

    Args:
        report: what the page shows.
        path: of the page.
        written: bytes of the page.
    """
    console = open_output()
    for what in report.faults.first:
        console.print(Text(plain(what), style="red"), soft_wrap=True)
    if report.faults.count > len(report.faults.first):
        console.print(f"... and {report.faults.count - len(report.faults.first):,} more")
    if report.manifest["status"] != "finished":
        console.print("the run has not finished: the page shows what is written so far")
    if report.other is not None:
        found = report.other[2]
        console.print(f"{found.equal:,} of {found.samples:,} output lines that both runs have are equal")
    shown = "1 of them" if len(report.shown) == 1 else f"{len(report.shown):,} of them"
    line = f"{plain(str(path))}: {counted(report.lines.samples, 'sample')}, {shown} window by window ({size(written)})"
    console.print(Text(line, style="bold red" if report.faults.count else "bold green"), soft_wrap=True)
