"""How a run, a check or a benchmark is going, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from detgen.progress import Progress
from detgen.show.screen import Screen, clock, plain

_INTERVAL = 10.0  # seconds between two lines of progress


def open_display(*, quiet: bool = False) -> QuietDisplay:
    """The display that suits standard error: live on a terminal, plain lines elsewhere, errors only if `quiet`."""
    console = Screen(stderr=True, highlight=False)
    if quiet:
        return QuietDisplay(console)
    return LiveDisplay(console) if console.file.isatty() and not console.is_dumb_terminal else PlainDisplay(console)


class QuietDisplay:
    """An `Observer` that shows errors and notices only. A context manager, as the louder displays are.

    Attributes:
        console: standard error.
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
        """The work is over: there will be no more progress."""

    def message(self, text: str) -> None:
        """Something worth a line of its own."""

    def stage(self, text: str) -> None:
        """What is being done from now on."""

    def progress(self, progress: Progress) -> None:
        """How far the work is."""

    def error(self, text: str) -> None:
        """Why the command failed; shown even if quiet."""
        self._print(f"detgen: error: {text}", style="red")

    def notice(self, text: str) -> None:
        """How the command ended, such as that it was interrupted; shown even if quiet."""
        self._print(f"detgen: {text}")

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(plain(text), style=style), soft_wrap=True)


class PlainDisplay(QuietDisplay):
    """Lines of text: for each stage, with the seconds until it began; at the first report, every ten seconds, and at
    the end.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._started = time.monotonic()
        self._latest: Progress | None = None
        self._shown: Progress | None = None

    def message(self, text: str) -> None:
        """Print it."""
        self.notice(text)

    def stage(self, text: str) -> None:
        """Print it; progress begins anew."""
        self.message(f"[{time.monotonic() - self._started:.1f} s] {text}")
        self._latest = self._shown = None

    def progress(self, progress: Progress) -> None:
        """Print a line if the last one is old enough."""
        self._latest = progress
        if self._shown is None or progress.seconds - self._shown.seconds >= _INTERVAL:
            self._show(progress)

    def close(self) -> None:
        """Print the last report, unless the last line did."""
        if self._latest is not None and self._latest != self._shown:
            self._show(self._latest)

    def _show(self, progress: Progress) -> None:
        self._shown = progress
        self.message(", ".join([_done(progress), *progress.figures, *_times(progress)]))


class LiveDisplay(PlainDisplay):
    """Two lines on a terminal, redrawn all the time: a bar, and the figures below it; before that, the stage."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._spinner = Spinner("dots")
        self._stage = "starting", self._started
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def close(self) -> None:
        """Clear the two lines."""
        self._live.stop()

    def stage(self, text: str) -> None:
        """Keep it for the next drawing; progress begins anew."""
        self._stage, self._latest = (text, time.monotonic()), None

    def progress(self, progress: Progress) -> None:
        """Keep it for the next drawing."""
        self._latest = progress

    def _draw(self) -> RenderableType:
        progress = self._latest
        row = Table.grid(padding=(0, 1))
        if progress is None:
            text, since = self._stage
            row.add_row(self._spinner, Text(plain(text)), Text(clock(time.monotonic() - since), style="dim"))
            return row
        words = "  ".join([_done(progress), *_times(progress)])
        if progress.total:
            row.add_row(ProgressBar(total=progress.total, completed=progress.done, width=24), words)
        else:
            row.add_row(self._spinner, words)
        return Group(row, Text(" · ".join(progress.figures), style="dim"))


def _done(progress: Progress) -> str:
    """Such as `12/64 prompts`, or `12 prompts` where the total is not known."""
    total = "" if progress.total is None else f"/{progress.total:,}"
    return f"{progress.done:,}{total} {progress.unit}"


def _times(progress: Progress) -> list[str]:
    left = [] if progress.left is None else [f"{clock(progress.left)} left"]
    return [f"{clock(progress.seconds)} elapsed", *left]
