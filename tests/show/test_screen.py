from __future__ import annotations

import io
import unicodedata

import pytest
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from detgen.show.screen import Screen, clock, open_output, plain

HOSTILE = "a\x1b]0;owned\x07\x1b[31mb\x9b2J\x7f\u202ec\u2066\u2028\r\n\tforged\ud800\U000e0041"
SHOWN = r"a\x1b]0;owned\x07\x1b[31mb\x9b2J\x7f\u202ec\u2066\u2028\r\n\tforged\ud800\U000e0041"


def screen(width: int = 300) -> Screen:
    return Screen(file=io.StringIO(), width=width, highlight=False)


def written(to: Screen) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]


def test_tables_are_wide_where_there_is_no_terminal() -> None:
    assert (open_output().width, open_output(160).width) == (120, 160)


def test_what_a_terminal_would_obey_is_seen_instead() -> None:
    """Control characters, directions of writing, line ends and what cannot be encoded, each as Python writes it."""
    assert plain(HOSTILE) == SHOWN
    assert plain("naïve 日本 😀 \u200d \\x1b") == "naïve 日本 😀 \u200d \\x1b"
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(chr(code)) in (
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
        ):
            assert plain(chr(code)).isprintable()


@pytest.mark.parametrize("whole", [HOSTILE, Text(HOSTILE), Text.assemble(("label", "bold"), HOSTILE)])
def test_a_text_is_one_line(whole: str | Text) -> None:
    out = screen()
    out.print(whole, soft_wrap=True, markup=False)
    found = written(out).removeprefix("label")
    if isinstance(whole, Text):  # rich itself leaves these two out of its texts
        assert found == SHOWN.replace(r"\x07", "").replace(r"\r", "") + "\n"
    else:
        assert found == SHOWN + "\n"


def test_nothing_forgets_it() -> None:
    """Tables, groups, live drawings and progress obey nothing either; their line ends are their own."""
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE))
    out = screen()
    out.print(table)
    out.print(Group(Text(HOSTILE), Text("next")))
    with Live(Text(HOSTILE), console=out):
        pass
    found = written(out)
    assert not [c for c in found if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert "forged" in found


def test_a_style_survives() -> None:
    out = Screen(file=io.StringIO(), width=100, force_terminal=True, highlight=False, color_system="standard")
    out.print(Text("bad\x1b[0m", style="red"))
    assert written(out) == "\x1b[31mbad\x1b[0m\x1b[31m\\x1b\x1b[0m\x1b[31m[0m\x1b[0m\n"
