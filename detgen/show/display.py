"""What a run shows: progress and messages on standard error, the closing summary on standard output.

It knows the counters of a run, not the engine behind them.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from detgen.show.screen import Screen, clock, size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from detgen.engine.stats import DrafterStats
    from detgen.run import Progress, RunSummary

__all__ = ["PLAIN_INTERVAL", "Screen", "clock", "open_display", "print_summary", "size"]

PLAIN_INTERVAL = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def open_display(*, quiet: bool = False) -> QuietDisplay:
    """The display that suits standard error: live on a terminal, plain lines elsewhere, errors alone if `quiet`."""
    console = Screen(stderr=True, highlight=False)
    if quiet:
        return QuietDisplay(console)
    return LiveDisplay(console) if console.file.isatty() and not console.is_dumb_terminal else PlainDisplay(console)


class QuietDisplay:
    """Shows errors and interruptions, and nothing else. A context manager, as the louder displays are.

    Its console stands for standard error.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The run is over: nothing more will be reported."""

    def message(self, text: str) -> None:
        """Something worth a line, such as that a run is resumed."""

    def progress(self, progress: Progress) -> None:
        """The state of the run has changed."""

    def summary(self, summary: RunSummary) -> None:
        """The closing figures of a run that finished."""

    def error(self, text: str) -> None:
        """Why the run was refused."""
        self._line(f"detgen: error: {text}", style="red")

    def interrupted(self, command: str) -> None:
        """The run was stopped; `command` goes on with it."""
        self._line("detgen: interrupted. What was finished is kept; the same command goes on from there:")
        self._line(f"  {command}")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)


class PlainDisplay(QuietDisplay):
    """Lines of text: at the first report, every few seconds, and at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._latest: Progress | None = None
        self._done = self._done_here = self._resumed = 0
        self._shown_at: float | None = None

    def message(self, text: str) -> None:
        """Print it on a line of its own."""
        self._line(f"detgen: {text}")

    def progress(self, progress: Progress) -> None:
        """Print a line if the last one is old enough."""
        self._keep(progress)
        if self._shown_at is None or progress.seconds - self._shown_at >= PLAIN_INTERVAL:
            self._show(progress)

    def close(self) -> None:
        """Print where the run ended, unless the last line said so."""
        if self._latest is not None and self._latest.seconds != self._shown_at:
            self._show(self._latest)

    def summary(self, summary: RunSummary) -> None:
        """Print the closing figures on standard output."""
        print_summary(summary)

    def _keep(self, progress: Progress) -> None:
        if progress.resumed == self._resumed:  # prompts that were finished before say nothing about the pace
            self._done_here += progress.prompts_done - self._done
        self._done, self._resumed = progress.prompts_done, progress.resumed
        self._latest = progress

    def _show(self, progress: Progress) -> None:
        self._shown_at = progress.seconds
        self.message(", ".join([prompts_done(progress), *figures(progress), *times(progress, self._done_here)]))


class LiveDisplay(PlainDisplay):
    """Two lines on a terminal, drawn over and over: a bar of prompts done, and the figures below it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def progress(self, progress: Progress) -> None:
        """Keep it for the next drawing."""
        self._keep(progress)

    def close(self) -> None:
        """Clear the two lines."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        progress = self._latest
        row = Table.grid(padding=(0, 1))
        if progress is None:
            row.add_row(self._spinner, "starting")
            return row
        words = "  ".join([prompts_done(progress), *times(progress, self._done_here)])
        if progress.prompts_total:
            row.add_row(ProgressBar(total=progress.prompts_total, completed=progress.prompts_done, width=24), words)
        else:
            row.add_row(self._spinner, words)
        return Group(row, Text(" · ".join(figures(progress)), style="dim"))


def prompts_done(progress: Progress) -> str:
    """Such as `12/64 prompts`, or `12 prompts` where the number of prompts is not known."""
    total = "" if progress.prompts_total is None else f"/{progress.prompts_total:,}"
    return f"{progress.prompts_done:,}{total} prompts"


def figures(progress: Progress) -> Iterator[str]:
    """Speed, requests at work, and how well the drafts do."""
    counts = progress.stats.drafters.total()
    if progress.seconds > 0:
        yield f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    yield f"{progress.stats.live} live"
    if counts.acceptance is not None:
        yield f"{counts.acceptance:.0%} of drafts accepted"
        yield f"{counts.corrected:,} roll-backs"
    if progress.errors:
        yield f"{progress.errors:,} errors"


def times(progress: Progress, done_here: int) -> Iterator[str]:
    """Time passed and, where it can be told from the prompts that were done in it, time left."""
    yield f"{clock(progress.seconds)} elapsed"
    if progress.prompts_total is not None and done_here > 0 and progress.prompts_done < progress.prompts_total:
        yield f"{clock((progress.prompts_total - progress.prompts_done) * progress.seconds / done_here)} left"


def print_summary(summary: RunSummary) -> None:
    """Print the closing figures of a run on standard output, a label and a value a line."""
    rows = list(_summary_rows(summary))
    width = max(len(label) for label, _ in rows)
    console = Screen(highlight=False)
    for label, value in rows:
        console.print(Text.assemble((f"{label:<{width}}", "bold"), f"  {value}"), soft_wrap=True)


def _summary_rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    drafters = summary.drafters
    drafted = sum(counts.drafted for counts in drafters.values())
    wasted = drafted - sum(counts.accepted for counts in drafters.values())
    fresh = summary.status != "already finished"
    yield "status", summary.status if fresh else f"{summary.status}: nothing was done; --overwrite starts afresh"
    yield "prompts", f"{summary.prompts:,}"
    if summary.samples != summary.prompts:
        yield "samples", f"{summary.samples:,}"
    yield "errors", f"{summary.errors:,}"
    if fresh and summary.resumed:
        yield "resumed", f"{summary.resumed:,} samples had been finished; the figures below are of the others"
    yield "tokens", f"{summary.tokens:,}"
    if summary.seconds > 0:
        yield "tokens a second", f"{summary.tokens / summary.seconds:,.1f} ({clock(summary.seconds)} in all)"
    if summary.target_passes:
        yield "tokens a target pass", f"{summary.tokens / summary.target_passes:.2f}"
    for name, counts in sorted(drafters.items()):
        yield f"drafter {name}", _drafter(counts)
    if drafted:
        yield "roll-backs", f"{sum(counts.corrected for counts in drafters.values()):,}"
        share = wasted / (wasted + summary.tokens)
        yield "recomputed", f"{share:.1%} of all tokens computed ({wasted:,} drafted and thrown away)"
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
        return f"{counts.unverified:,} tokens, not verified"
    return f"nothing drafted in {counts.rounds:,} rounds"
