"""Where things are shown: consoles that survive a reader who leaves, and times and sizes in words."""

from __future__ import annotations

import os

from rich.console import Console


class Screen(Console):
    """A console that falls silent when its reader leaves, as in `| head`, where rich's ends the process.

    What a command has done is in its files and its exit code.
    """

    def on_broken_pipe(self) -> None:
        """Show nothing from now on, not even what the stream still holds."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_output(width: int = 120) -> Screen:
    """Standard output for tables: as wide as the terminal, or `width` columns where there is none."""
    screen = Screen(highlight=False)
    if not screen.is_terminal:
        screen.width = width
    return screen


def clock(seconds: float) -> str:
    """Such as `0:01:05`."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def size(number: float) -> str:
    """Such as `412.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.1f} {unit}" if unit != "bytes" else f"{number:.0f} bytes"
        number /= 1024
    return f"{number:.1f} GiB"
