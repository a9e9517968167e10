"""The closing figures of a run, on standard output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from detgen.show.screen import Screen, clock, size

if TYPE_CHECKING:
    from detgen.engine.stats import DrafterStats
    from detgen.run import RunSummary


def print_summary(summary: RunSummary) -> None:
    """Print a label and a value per line.

    Raises:
        OSError: standard output cannot be written.
    """
    rows = list(_rows(summary))
    width = max(len(label) for label, _ in rows)
    console = Screen(highlight=False)
    for label, value in rows:
        console.print(Text.assemble((f"{label:<{width}}", "bold"), f"  {value}"), soft_wrap=True)


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    total = summary.drafters.total()
    discarded = total.drafted - total.accepted
    fresh = summary.status != "already finished"
    yield "status", summary.status if fresh else f"{summary.status}: nothing was done; --overwrite starts over"
    yield "prompts", f"{summary.prompts:,}"
    if summary.samples != summary.prompts:
        yield "samples", f"{summary.samples:,}"
    yield "errors", f"{summary.errors:,}"
    if fresh and summary.resumed:
        yield "resumed", f"{summary.resumed:,} samples were finished before; the figures below leave them out"
    yield "tokens", f"{summary.tokens:,}"
    if summary.seconds > 0:
        yield "tokens per second", f"{summary.tokens / summary.seconds:,.1f} ({clock(summary.seconds)} in all)"
    if summary.target_passes:
        yield "tokens per target pass", f"{summary.tokens / summary.target_passes:.2f}"
    for name, counts in sorted(summary.drafters.items()):
        yield f"drafter {name}", _drafter(counts)
    if total.drafted:
        yield "roll-backs", f"{total.corrected:,}"
        share = discarded / (discarded + summary.tokens)
        yield "recomputed", f"{share:.1%} of all computed tokens ({discarded:,} drafted and discarded)"
    if fresh:
        yield "peak memory", size(summary.peak_memory)
    if not summary.deterministic:
        yield "determinism", "not guaranteed for this model on this device"
    yield "output", str(summary.output)
    if summary.sha256:
        yield "SHA-256 of outputs.jsonl", summary.sha256


def _drafter(counts: DrafterStats) -> str:
    if counts.acceptance is not None:
        return f"{counts.acceptance:.1%} of {counts.drafted:,} drafted tokens accepted in {counts.rounds:,} rounds"
    if counts.unverified:
        return f"{counts.unverified:,} unverified tokens"
    return f"nothing drafted in {counts.rounds:,} rounds"
