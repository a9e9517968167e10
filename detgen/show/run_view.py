"""The closing figures of a run, on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from detgen.machine import size
from detgen.outputs import first_errors
from detgen.report.words import counted
from detgen.show.screen import Screen, clock, plain

if TYPE_CHECKING:
    from detgen.engine.chunks import Chunk
    from detgen.engine.stats import DrafterStats
    from detgen.run import RunSummary

_SHOWN = 3  # errors


def print_summary(summary: RunSummary) -> None:
    """Print a label and a value per line; before them, if they are known, the first prompt's chunks."""
    console = Screen(highlight=False)
    if summary.chunks:
        print_chunks(summary.chunks)
        console.print()
    console.rows(_rows(summary))


def print_chunks(chunks: Iterable[Chunk]) -> None:
    """Print how a model that thinks took in a prompt."""
    console = Screen(highlight=False)
    for line in drawing(chunks):
        console.say(line)


def drawing(chunks: Iterable[Chunk]) -> list[str]:
    """Chunks, the states that they were read with and what was thought after them, a line each below a heading."""
    rows: list[tuple[str, ...]] = [("tokens", "chunk", "state of", "thought")]
    for chunk in chunks:
        tokens = f"{chunk.first}-{chunk.end - 1}" if chunk.end > chunk.first + 1 else str(chunk.first)
        rows.append((tokens, *map(_quoted, (chunk.text, chunk.state, chunk.thought))))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(set_cell_size, row, widths)).rstrip() for row in rows]


def _quoted(text: str | None) -> str:
    return "-" if text is None else f'"{plain(text)}"'


def failures(summary: RunSummary, *, kept: bool = True) -> Iterator[str]:
    """What could not be run: how much, the first errors, and where the rest are; nothing if all could."""
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
