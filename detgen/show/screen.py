"""Consoles that survive a closed pipe and hostile text, and numbers in words.

Text from elsewhere, such as a file's name or a library's error, may contain control sequences for a terminal. All
output of commands passes through `Screen` or `plain`, which show these instead of sending them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Characters that move the cursor, change the direction of writing, end a line, cannot be encoded, or are invisible.
_OBEYED = (
    r"\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
    r"\U000e0000-\U000e007f"
)
_IN_A_SEGMENT = re.compile(f"[{_OBEYED}]")
_IN_A_TEXT = re.compile(f"(?!\t)[{_OBEYED}]")
_IN_A_LINE = re.compile(f"[{_OBEYED}\n]")


def plain(text: str) -> str:
    """Return a text on one line with control characters escaped: `\\x1b` stands for an escape character."""
    return _IN_A_LINE.sub(_escaped, text)


def plain_lines(text: str) -> str:
    """Return a text with control characters escaped, except line breaks and tabs."""
    return _IN_A_TEXT.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


class Screen(Console):
    """A console that escapes control characters and puts each text on one line.

    It falls silent when its reader leaves, as in `| head`, where rich's console would end the process: a command's
    result is in its files and its exit status.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but each text on one line."""
        super().print(*map(_one_line, objects), **options)

    def say(self, text: str, style: str = "") -> None:
        """Print one line, whatever its length."""
        self.print(Text(text, style=style), soft_wrap=True)

    def rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print a label and a value per line."""
        rows = list(rows)
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            self.print(Text.assemble((f"{label:<{width}}", "bold"), f"  {value}"), soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of anything else, such as a table, which keeps its own line ends."""
        for segment in super().render(renderable, options):
            if segment.control or not _IN_A_SEGMENT.search(segment.text):
                yield segment
            else:
                yield Segment(_IN_A_SEGMENT.sub(_escaped, segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Show nothing from now on, not even what the stream still holds."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _one_line(shown: Any) -> Any:
    if isinstance(shown, str):
        return plain(shown)
    if isinstance(shown, Text) and _IN_A_LINE.search(shown.plain):
        pieces, end = [], 0
        for found in _IN_A_LINE.finditer(shown.plain):
            pieces += [shown[end : found.start()], Text(_escaped(found), style=shown.style)]
            end = found.end()
        return Text("", style=shown.style).join([*pieces, shown[end:]])
    return shown


def open_output(width: int = 120) -> Screen:
    """Return standard output for tables: as wide as the terminal, or `width` columns without one."""
    screen = Screen(highlight=False)
    if not screen.is_terminal:
        screen.width = width
    return screen


def clock(seconds: float) -> str:
    """Return a time such as `0:01:05`."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
