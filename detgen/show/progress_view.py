"""The progress of a run, a check or a benchmark on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from detgen.progress import Progress, Unobserved
from detgen.show.screen import Screen, clock, plain

_INTERVAL = 10.0  # seconds between two lines of progress


def open_display(*, quiet: bool = False, as_json: bool = False) -> QuietDisplay:
    """Return the display that suits standard error: live on a terminal, plain lines elsewhere.

    Args:
        quiet: show only errors and how the command ends.
        as_json: write JSON objects for programs.
    """
    console = Screen(stderr=True, highlight=False)
    if as_json:
        return JsonDisplay(console, quiet=quiet)
    if quiet:
        return QuietDisplay(console)
    return LiveDisplay(console) if _is_drawn_upon(console) else PlainDisplay(console)


def open_for_a_person() -> QuietDisplay:
    """Return the display for a call from Python: live on a terminal or in a notebook, else quiet."""
    console = Screen(stderr=True, highlight=False)
    if console.is_jupyter and not _is_drawn_upon(console):
        return PlainDisplay(console)
    return LiveDisplay(console) if _is_drawn_upon(console) else QuietDisplay(console)


def _is_drawn_upon(console: Screen) -> bool:
    """Return whether lines can be redrawn; in a notebook, rich needs ipywidgets to do so."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.file.isatty() and not console.is_dumb_terminal


class QuietDisplay(Unobserved):
    """An `Observer` that shows only errors and notices. A context manager, like the louder displays.

    Attributes:
        console: standard error.
        quiet: whether successful results are left out, too.
    """

    quiet = True

    def __init__(self, console: Screen) -> None:
        self.console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End; there will be no more progress."""

    def error(self, text: str) -> None:
        """Show why the command failed, even if quiet."""
        self.console.say(f"detgen: error: {text}", "red")

    def notice(self, text: str, command: str = "") -> None:
        """Show how the command ended, such as an interruption, and what to type now, even if quiet."""
        self.console.say(f"detgen: {text}")
        if command:
            self.console.say(f"  {command}")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Make room for other output, perhaps to the same terminal."""
        yield


class PlainDisplay(QuietDisplay):
    """Lines of text: one per stage, with the seconds until it began, and progress at first, every ten seconds and at
    the end.
    """

    quiet = False

    def __init__(self, console: Screen) -> None:
        super().__init__(console)
        self._started = time.monotonic()
        self._latest: Progress | None = None
        self._shown: Progress | None = None

    def message(self, text: str) -> None:
        """Print the text."""
        self.notice(text)

    def stage(self, text: str) -> None:
        """Print the text; progress starts anew."""
        self.message(f"[{time.monotonic() - self._started:.1f} s] {text}")
        self._latest = self._shown = None

    def progress(self, progress: Progress) -> None:
        """Print a line if the last one is old enough."""
        self._latest = progress
        if self._shown is None or progress.seconds - self._shown.seconds >= _INTERVAL:
            self._show(progress)

    def close(self) -> None:
        """Print the last report, unless it was printed already."""
        if self._latest is not None and self._latest != self._shown:
            self._show(self._latest)

    def _show(self, progress: Progress) -> None:
        self._shown = progress
        self.message(", ".join([_done(progress), *progress.figures, *_times(progress)]))


class LiveDisplay(PlainDisplay):
    """Two lines on a terminal, redrawn all the time: a bar with figures below it, and before that the stage."""

    def __init__(self, console: Screen) -> None:
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

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Clear the two lines meanwhile if standard output is a terminal, too."""
        drawn = self._live.is_started and sys.stdout is not None and sys.stdout.isatty()
        if drawn:
            self._live.stop()
        yield
        if drawn:
            self._live.start()

    def stage(self, text: str) -> None:
        """Keep the stage for the next drawing; progress starts anew."""
        self._stage, self._latest = (text, time.monotonic()), None

    def progress(self, progress: Progress) -> None:
        """Keep the progress for the next drawing."""
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


class JsonDisplay(PlainDisplay):
    """One JSON object per line, for programs: `event`, `time` (seconds since 1970), and the event's own keys."""

    def __init__(self, console: Screen, *, quiet: bool) -> None:
        super().__init__(console)
        self.quiet = quiet

    def message(self, text: str) -> None:
        """Write `text`."""
        if not self.quiet:
            self._write("message", text=text)

    def stage(self, text: str) -> None:
        """Write `text`; progress starts anew."""
        if not self.quiet:
            self._write("stage", text=text)
        self._latest = self._shown = None

    def progress(self, progress: Progress) -> None:
        """Write the progress, at most once a second."""
        self._latest = progress
        if self._shown is None or progress.seconds - self._shown.seconds >= 1.0:
            self._show(progress)

    def error(self, text: str) -> None:
        """Write `text`."""
        self._write("error", text=text)

    def notice(self, text: str, command: str = "") -> None:
        """Write `text`, and `command` if there is one."""
        self._write("notice", text=text, **({"command": command} if command else {}))

    def _show(self, progress: Progress) -> None:
        self._shown = progress
        if not self.quiet:
            self._write("progress", **(asdict(progress) | {"figures": list(progress.figures)}))

    def _write(self, event: str, **said: Any) -> None:
        self.console.say(json.dumps({"event": event, "time": round(time.time(), 3), **said}))


def _done(progress: Progress) -> str:
    """Return progress such as `12/64 prompts`, or `12 prompts` if the total is unknown."""
    total = "" if progress.total is None else f"/{progress.total:,}"
    return f"{progress.done:,}{total} {progress.unit}"


def _times(progress: Progress) -> list[str]:
    left = [] if progress.left is None else [f"{clock(progress.left)} left"]
    return [f"{clock(progress.seconds)} elapsed", *left]
