"""How `detgen audit` shows what it found."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from detgen.show.screen import open_output
from detgen.verify.replay.result import AuditResult


def show_audit(result: AuditResult, folder: Path) -> None:
    """The findings, then one line."""
    console = open_output()
    for line in result.other_profile:
        console.print(Text(f"another profile: {line}"), soft_wrap=True)
    if result.other_profile:
        share = f"{result.tolerance:g} of a row's largest logit"
        console.print(Text(f"bit equality is not promised; a margin within {share} is a tie"), soft_wrap=True)
    for finding in result.findings:
        style = "" if finding.kind == "tie" else "red"
        tie = "tie: " if finding.kind == "tie" else ""
        console.print(Text(f"{finding.where}: {tie}{finding.what}", style=style), soft_wrap=True)
    if result.faults + result.ties > len(result.findings):
        console.print(f"... and {result.faults + result.ties - len(result.findings):,} more")
    if result.unverified:
        console.print(f"{result.unverified:,} samples of unverified requests were not judged")
    if not result.logged:
        console.print("the run has no acceptance log: who drafted what, and margins, were not judged", soft_wrap=True)
    if result.missing:
        console.print(f"the run was stopped: {result.missing:,} samples are missing")
    speed = result.tokens / result.seconds if result.seconds else 0.0
    own = result.run_speed
    beside = f" ({speed / own:.1f} times the run's own {own:,.0f})" if own and result.tokens else ""
    line = f"{folder}: {result.samples:,} samples, {result.tokens:,} tokens at {speed:,.0f} per second{beside}: "
    if not result.faults:
        ties = f", {result.ties:,} ties" if result.ties else ""
        console.print(Text(f"{line}nothing differs{ties}", style="bold green"), soft_wrap=True)
    else:
        counts = f"{result.faults:,} faults, {result.differing:,} of them tokens that differ, {result.ties:,} ties"
        console.print(Text(line + counts, style="bold red"), soft_wrap=True)
