"""How the commands that judge, draw, export or prune what is there show their results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from detgen.machine import size
from detgen.report.words import counted
from detgen.show.screen import open_output

if TYPE_CHECKING:
    from detgen.cache.cache_folder import Contents, Pruned
    from detgen.doctor import Finding
    from detgen.export.exporting import Exported
    from detgen.models.known import Known, Tried
    from detgen.report.reporting import Report
    from detgen.verify.replay.result import AuditResult


def show_audit(result: AuditResult, folder: Path) -> None:
    """The findings of `detgen audit`, then one line."""
    console = open_output()
    for line in result.other_profile:
        console.say(f"another profile: {line}")
    if result.other_profile:
        share = f"{result.tolerance:g} of a row's largest logit"
        console.say(f"bit equality is not promised; a margin within {share} is a tie")
    for finding in result.findings:
        tie = finding.kind == "tie"
        console.say(f"{finding.where}: {'tie: ' * tie}{finding.what}", "" if tie else "red")
    if result.faults + result.ties > len(result.findings):
        console.say(f"... and {result.faults + result.ties - len(result.findings):,} more")
    if result.unverified:
        console.say(f"{result.unverified:,} samples of unverified requests were not judged")
    if not result.logged:
        console.say("the run has no acceptance log: who drafted what, and margins, were not judged")
    if result.missing:
        console.say(f"the run was stopped: {result.missing:,} samples are missing")
    speed = result.tokens / result.seconds if result.seconds else 0.0
    own = result.run_speed
    ratio = f" ({speed / own:.1f} times the run's own {own:,.0f})" if own and result.tokens else ""
    read = f"{counted(result.samples, 'sample')}, {counted(result.tokens, 'token')}"
    line = f"{folder}: {read} at {speed:,.0f} per second{ratio}: "
    if not result.faults:
        ties = f", {result.ties:,} ties" if result.ties else ""
        console.say(f"{line}nothing differs{ties}", "bold green")
    else:
        counts = f"{result.faults:,} faults, {result.differing:,} of them tokens that differ, {result.ties:,} ties"
        console.say(line + counts, "bold red")


def show_report(report: Report, path: Path, written: int) -> None:
    """What is wrong with the folder that `detgen report` drew, then one line.

    Args:
        report: what the page shows.
        path: of the page.
        written: bytes of the page.
    """
    console = open_output()
    for what in report.faults.first:
        console.say(what, "red")
    if report.faults.count > len(report.faults.first):
        console.say(f"... and {report.faults.count - len(report.faults.first):,} more")
    if report.manifest["status"] != "finished":
        console.say("the run has not finished: the page shows what is written so far")
    if report.other is not None:
        found = report.other[2]
        console.say(f"{found.equal:,} of {found.samples:,} output lines that both runs have are equal")
    shown = f"{len(report.shown):,} of them window by window"
    line = f"{path}: {counted(report.lines.samples, 'sample')}, {shown} ({size(written)})"
    console.say(line, "bold red" if report.faults.count else "bold green")


def show_export(exported: Exported) -> None:
    """What `detgen export` wrote."""
    open_output().say(f"{exported.path}: {counted(exported.count, exported.unit)}")


def show_finding(finding: Finding) -> None:
    """A line for what `detgen doctor` has looked at, and one for what to type if it should be otherwise."""
    console = open_output()
    console.say(f"{finding.name:<12}  {finding.what}", "red" if finding.broken else "")
    if finding.remedy is not None:
        console.say(f"{'':<12}  -> {finding.remedy}")


def show_models(models: list[Known]) -> None:
    """What `detgen models` has found, a row for each."""
    formats = next((model.weights for model in models if model.weights), {})
    head = ("model", "family", "parameters", "as stored", *formats, "KV, 1,000 tokens")
    table = Table(*head, box=None, pad_edge=False)
    for column in table.columns[:2]:
        column.overflow = "fold"
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for model in models:
        if model.error is None:
            family = model.family if model.whole else f"{model.family} (see docs/models.md)"
            weights = (size(model.weights[each]) if each in model.weights else "" for each in formats)
            kv = "" if model.kv is None else size(1000 * model.kv)
            table.add_row(model.name, family, f"{model.parameters:,}", size(model.stored), *weights, kv)
    console = open_output()
    if table.rows:
        console.print(table)
    for model in models:
        if model.error is not None:
            console.say(model.error if model.name in model.error else f"{model.name}: {model.error}", "red")


def show_families(version: str, families: list[Tried]) -> None:
    """How the families of a version of transformers run, a row for each."""
    table = Table("model type", "class", "runs", "operators proved, or why it is refused", box=None, pad_edge=False)
    for family in families:
        table.add_row(*family)
    console = open_output()
    console.print(table)
    counts = Counter(family.status for family in families)
    found = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    console.say(f"{len(families)} model types of transformers {version}: {found}")


def show_contents(path: Path, contents: Contents) -> None:
    """What a completion cache holds."""
    open_output().rows(_contents(path, contents))


def show_pruned(path: Path, pruned: Pruned) -> None:
    """What was removed from a completion cache."""
    removed = counted(pruned.removed, "completion")
    open_output().say(f"{path}: {removed} removed, {size(pruned.after)} left of {size(pruned.before)}")


def _contents(path: Path, contents: Contents) -> Iterator[tuple[str, str]]:
    yield "cache", str(path)
    yield "size", size(contents.size)
    yield "completions", f"{contents.completions:,}"
    yield "tokens", f"{contents.tokens:,}"
    if contents.oldest is not None and contents.latest is not None:
        yield "least recent use", _day(contents.oldest)
        yield "latest use", _day(contents.latest)
    if contents.damaged is not None:
        yield "damaged", f"{contents.damaged:,}"
    for model in contents.models:
        other = "" if model.usable else f"; of detgen {model.version}, which this one cannot use"
        made = f"{counted(model.completions, 'completion')}, {model.tokens:,} tokens"
        yield "model", f"{model.name} ({model.digest}): {made}{other}"


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
