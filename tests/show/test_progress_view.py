from __future__ import annotations

import io
import sys
import time
from dataclasses import replace

import pytest

from detgen.progress import Progress
from detgen.show.progress_view import LiveDisplay, PlainDisplay, QuietDisplay, open_display
from detgen.show.screen import Screen

PROGRESS = Progress(12, 64, "prompts", 6.0, figures=("100 tokens/s", "16 live"))


def console(*, terminal: bool = False) -> Screen:
    return Screen(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, legacy_windows=False)


def written(to: Screen) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_plain_lines_come_first_then_seldom_then_last() -> None:
    out = console()
    with PlainDisplay(out) as display:
        for second in range(26):
            display.progress(replace(PROGRESS, done=second, seconds=float(second)))
    lines = written(out).splitlines()
    assert [line.split("/")[0] for line in lines] == [f"detgen: {done}" for done in (0, 10, 20, 25)]


def test_a_plain_line_says_all_that_matters() -> None:
    out = console()
    with PlainDisplay(out) as display:
        display.message("resuming")
        display.progress(replace(PROGRESS, done=1_000, total=6_400, left=36.0))
        display.progress(replace(PROGRESS, total=None, figures=()))
    assert written(out) == (
        "detgen: resuming\n"
        "detgen: 1,000/6,400 prompts, 100 tokens/s, 16 live, 0:00:06 elapsed, 0:00:36 left\n"
        "detgen: 12 prompts, 0:00:06 elapsed\n"
    )


def test_no_line_is_shown_twice() -> None:
    out = console()
    with PlainDisplay(out) as display:
        display.progress(PROGRESS)
    assert written(out).count("\n") == 1


def test_work_that_reports_nothing_shows_nothing() -> None:
    out = console()
    with PlainDisplay(out):
        pass
    assert written(out) == ""


@pytest.mark.parametrize(("total", "done"), [(64, "12/64 prompts"), (None, "12 prompts")])
def test_a_terminal_is_drawn_upon(total: int | None, done: str) -> None:
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.message("resuming")
        display.progress(replace(PROGRESS, total=total))
        time.sleep(0.6)
    drawn = written(out)
    for words in ("starting", "detgen: resuming", done, "100 tokens/s · 16 live", "0:00:06 elapsed"):
        assert words in drawn
    assert drawn.rstrip().endswith("\x1b[2K"), "the drawing is cleared at the end"


def test_errors_are_red_lines_even_while_drawing() -> None:
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.error("no [such] file: " + "x" * 200)
    assert "\x1b[31mdetgen: error: no [such] file: " + "x" * 200 in written(out)


def test_quiet_shows_errors_and_notices_only() -> None:
    out = console()
    with QuietDisplay(out) as display:
        display.message("resuming")
        display.progress(PROGRESS)
        display.error("no such file")
        display.notice("interrupted")
    assert written(out) == "detgen: error: no such file\ndetgen: interrupted\n"


def test_the_display_suits_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_display()) is PlainDisplay
    assert type(open_display(quiet=True)) is QuietDisplay
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert type(open_display()) is LiveDisplay
    assert type(open_display(quiet=True)) is QuietDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_display()) is PlainDisplay


def test_stages_are_lines_with_the_time_at_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = console()
    with PlainDisplay(out) as display:
        display.stage("reading the prompts")
        now += 1.24
        display.stage("downloading a\x1b/b")
        display.progress(replace(PROGRESS, unit="MB", seconds=30.0))
        display.stage("probing")
        display.progress(PROGRESS)
    assert written(out) == (
        "detgen: [0.0 s] reading the prompts\n"
        "detgen: [1.2 s] downloading a\\x1b/b\n"
        "detgen: 12/64 MB, 100 tokens/s, 16 live, 0:00:30 elapsed\n"
        "detgen: [1.2 s] probing\n"
        "detgen: 12/64 prompts, 100 tokens/s, 16 live, 0:00:06 elapsed\n"
    )
    quiet = console()
    QuietDisplay(quiet).stage("probing")
    assert written(quiet) == ""


def test_a_stage_is_drawn_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.progress(PROGRESS)
        display.stage("probing \x1b[31m")
        since = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: since() + 65)
        time.sleep(0.6)
    drawn = written(out)
    assert "probing \\x1b[31m" in drawn
    assert "0:01:05" in drawn


@pytest.mark.parametrize("terminal", [True, False])
def test_the_drawing_makes_room_for_what_is_written_to_the_same_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    out = console(terminal=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with LiveDisplay(out) as display:
        display.progress(PROGRESS)
        time.sleep(0.3)
        with display.aside():
            drawn = written(out)
            assert drawn.rstrip().endswith("\x1b[2K") == terminal, "cleared"
            time.sleep(0.6)
            assert (written(out) == drawn) == terminal, "nothing is drawn meanwhile"
        time.sleep(0.6)
        assert len(written(out)) > len(drawn), "and it goes on"
