"""How a benchmark is going, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from detgen.progress import Progress
from detgen.show.display import PLAIN_INTERVAL, clock


class BenchProgress:
    """An observer that shows what it is told. A context manager.

    Args:
        console: stands for standard error.
        quiet: show nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._shown_at = -PLAIN_INTERVAL
        live = not quiet and console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """Show a line of its own."""
        if not self._quiet:
            self._console.print(Text(f"detgen: {text}"), soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        """Show the bar, or a line if the last one is old enough."""
        left = "" if progress.left is None else f"{clock(progress.left)} left"
        words = [f"{progress.done}/{progress.total} {progress.unit}", left, *progress.figures]
        if self._live is not None:
            row = Table.grid(padding=(0, 1))
            row.add_row(ProgressBar(total=progress.total, completed=progress.done, width=24), *words)
            self._live.update(row)
        elif time.monotonic() - self._shown_at >= PLAIN_INTERVAL:
            self._shown_at = time.monotonic()
            self.message(", ".join(filter(None, words)))
