"""How commands show their results: the closing figures of a run, and the results of audits, reports and exports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.table import Table

from detgen.machine import size
from detgen.outputs import first_errors
from detgen.report.words import counted
from detgen.show.screen import Screen, clock, open_output, plain

if TYPE_CHECKING:
    from detgen.cache.cache_folder import Contents, Pruned
    from detgen.doctor import Finding
    from detgen.engine.request import Chunk
    from detgen.engine.stats import DrafterStats
    from detgen.export.exporting import Exported
    from detgen.models.known import Known, Tried
    from detgen.report.reporting import Report
    from detgen.run import RunSummary
    from detgen.verify.replay.result import AuditResult

_SHOWN = 3  # errors


def show_audit(result: AuditResult, folder: Path) -> None:
    """Print the findings of `detgen audit`, then one line."""
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
    """Print what is wrong with the folder that `detgen report` drew, then one line.

    Args:
        report: contents of the page.
        path: path of the page.
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
    """Print what `detgen export` wrote."""
    open_output().say(f"{exported.path}: {counted(exported.count, exported.unit)}")


def show_finding(finding: Finding) -> None:
    """Print a finding of `detgen doctor`, and the command that remedies it, if any."""
    console = open_output()
    console.say(f"{finding.name:<12}  {finding.what}", "red" if finding.broken else "")
    if finding.remedy is not None:
        console.say(f"{'':<12}  -> {finding.remedy}")


def show_models(models: list[Known]) -> None:
    """Print the models that `detgen models` found, one per row."""
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
    """Print how the families of a version of transformers run, one per row."""
    table = Table("model type", "class", "runs", "operators proved, or why it is refused", box=None, pad_edge=False)
    for family in families:
        table.add_row(*family)
    console = open_output()
    console.print(table)
    counts = Counter(family.status for family in families)
    found = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    console.say(f"{len(families)} model types of transformers {version}: {found}")


def show_contents(path: Path, contents: Contents) -> None:
    """Print what a completion cache holds."""
    open_output().rows(_contents(path, contents))


def show_pruned(path: Path, pruned: Pruned) -> None:
    """Print what was removed from a completion cache."""
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


def print_summary(summary: RunSummary) -> None:
    """Print a label and a value per line, after the first prompt's chunks if they are known."""
    console = Screen(highlight=False)
    if summary.chunks:
        print_chunks(summary.chunks)
        console.print()
    console.rows(_rows(summary))


def print_chunks(chunks: Iterable[Chunk]) -> None:
    """Print how a model that thinks read a prompt."""
    console = Screen(highlight=False)
    for line in drawing(chunks):
        console.say(line)


def drawing(chunks: Iterable[Chunk]) -> list[str]:
    """Return lines for chunks, with the states they were read with and the thoughts after them, below a heading."""
    rows: list[tuple[str, ...]] = [("tokens", "chunk", "state of", "thought")]
    for chunk in chunks:
        tokens = f"{chunk.first}-{chunk.end - 1}" if chunk.end > chunk.first + 1 else str(chunk.first)
        rows.append((tokens, *map(_quoted, (chunk.text, chunk.state, chunk.thought))))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(set_cell_size, row, widths)).rstrip() for row in rows]


def _quoted(text: str | None) -> str:
    return "-" if text is None else f'"{plain(text)}"'


def failures(summary: RunSummary, *, kept: bool = True) -> Iterator[str]:
    """Yield lines about prompts that could not run: how many, the first errors, and where the rest are."""
    written = summary.written
    if not written.errors:
        return
    whole = "no prompt could be run" if summary.all_failed else f"{counted(written.errors, 'prompt')} could not be run"
    where = f" are in {summary.output / 'outputs.jsonl'}" if kept else ""
    errors = first_errors(summary.output / "outputs.jsonl", _SHOWN)
    yield f"{whole}:" if errors else whole
    yield from (f"  {error}" for error in errors)
    if written.errors > len(errors):
        yield f"  {written.errors - len(errors):,} more{where}, with an error"


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    written, made = summary.written, summary.fresh
    drafts = made.drafters.total()
    wasted = drafts.drafted - drafts.accepted
    fresh = summary.status != "already finished"
    yield "status", summary.status if fresh else f"{summary.status}: nothing was done; --overwrite starts over"
    yield "prompts", f"{written.prompts:,}"
    if written.samples != written.prompts:
        yield "samples", f"{written.samples:,}"
    yield "errors", f"{written.errors:,}"
    if fresh and summary.resumed:
        yield "resumed", f"{counted(summary.resumed, 'sample')} of this run; the figures below leave them out"
    if summary.reused:
        yield "reused", f"{counted(summary.reused, 'sample')} of earlier runs; the figures below leave them out"
    yield "tokens", f"{made.tokens:,}"
    if (answers := written.answers).prompts:
        share, by_length = answers.right / answers.prompts, answers.right_by_length / answers.prompts
        of = counted(answers.prompts, "prompt")
        yield "accuracy", f"{share:.1%} of {of} with an answer; {by_length:.1%} by log-probability per character"
    if answers.unknown:
        yield "answers", f"{answers.unknown:,} that are none of their prompt's completions, and not counted"
    if summary.seconds > 0:
        yield "tokens per second", f"{made.tokens / summary.seconds:,.1f} ({clock(summary.seconds)} in all)"
    if (thinking := summary.thoughts) is not None:
        rounds = f"{thinking.prefill_rounds:,} prefill rounds, {thinking.passes_saved:,} passes saved"
        yield "thoughts", f"{thinking.thoughts:,} written, {thinking.chunks:,} chunks, {rounds}"
    if summary.target_passes:
        yield "tokens per target pass", f"{made.tokens / summary.target_passes:.2f}"
    for name, counts in sorted(made.drafters.items()):
        yield f"drafter {name}", _drafter(counts)
    if drafts.drafted:
        yield "roll-backs", f"{drafts.corrected:,}"
        share = wasted / (wasted + made.tokens)
        yield "recomputed", f"{share:.1%} of all tokens computed ({wasted:,} drafted and thrown away)"
    if fresh:
        yield "peak memory", size(summary.peak_memory)
    yield "output", str(summary.output)
    if summary.sha256:
        yield "SHA-256 of outputs.jsonl", summary.sha256
    if summary.results:
        yield "SHA-256 of results.jsonl", summary.results


def _drafter(counts: DrafterStats) -> str:
    if counts.acceptance is not None:
        return f"{counts.acceptance:.1%} of {counts.drafted:,} drafted tokens accepted in {counts.rounds:,} rounds"
    rounds, unverified = counts.rounds - counts.unverified, f"{counts.unverified:,} unverified tokens"
    plain = f"nothing drafted in {rounds:,} rounds"
    return ", ".join(said for said, there in ((plain, rounds), (unverified, counts.unverified)) if there)
