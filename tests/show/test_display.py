from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from detgen.engine.stats import DraftCounts, DrafterStats, EngineStats
from detgen.run import Progress, RunSummary
from detgen.show.display import LiveDisplay, PlainDisplay, QuietDisplay, open_display, print_summary

MODEL = DrafterStats(rounds=20, drafted=80, accepted=60, corrected=8, bonus=12, rolled_back=12)


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, legacy_windows=False)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def progress(done: int = 12, total: int | None = 64, seconds: float = 6.0, resumed: int = 0) -> Progress:
    stats = EngineStats(tokens=600, live=16, drafters=DraftCounts(model=MODEL))
    return Progress(
        prompts_done=done, prompts_total=total, errors=0, tokens=600, seconds=seconds, resumed=resumed, stats=stats
    )


def summary(**changes: object) -> RunSummary:
    values: dict[str, object] = {
        "status": "finished",
        "output": Path("some folder/prompts-out"),
        "prompts": 64,
        "samples": 64,
        "errors": 2,
        "resumed": 0,
        "tokens": 4096,
        "seconds": 8.0,
        "target_passes": 256,
        "peak_memory": 412 * 2**20,
        "drafters": {"model": MODEL, "none": DrafterStats(rounds=5, plain=5)},
        "sha256": "0123456789abcdef" * 4,
        "deterministic": True,
    }
    return RunSummary(**(values | changes))  # type: ignore[arg-type]


def test_plain_lines_come_first_then_seldom_then_last() -> None:
    out = console()
    with PlainDisplay(out) as display:
        for second in range(26):
            display.progress(progress(done=second, seconds=float(second)))
    lines = written(out).splitlines()
    assert [line.split("/")[0] for line in lines] == [f"detgen: {done}" for done in (0, 10, 20, 25)]


def test_a_plain_line_says_all_that_matters() -> None:
    out = console()
    with PlainDisplay(out) as display:
        display.message("resuming")
        display.progress(progress(done=0, seconds=0.0))
        display.progress(progress(done=16, seconds=12.0))
    assert written(out) == (
        "detgen: resuming\n"
        "detgen: 0/64 prompts, 16 live, 75% of drafts accepted, 8 roll-backs, 0:00:00 elapsed\n"
        "detgen: 16/64 prompts, 50 tokens/s, 16 live, 75% of drafts accepted, 8 roll-backs,"
        " 0:00:12 elapsed, 0:00:36 left\n"
    )


def test_the_total_may_be_unknown() -> None:
    out = console()
    with PlainDisplay(out) as display:
        display.progress(progress(total=None))
    assert "detgen: 12 prompts, " in written(out)
    assert "left" not in written(out)


def test_time_left_counts_only_what_this_run_did() -> None:
    out = console()
    with PlainDisplay(out) as display:
        display.progress(progress(done=10, seconds=0.0))
        display.progress(progress(done=50, seconds=0.0, resumed=40))
        display.progress(progress(done=60, seconds=10.0, resumed=40))
    assert written(out).splitlines()[-1].endswith("0:00:10 elapsed, 0:00:02 left")


def test_errors_are_counted() -> None:
    out = console()
    report = progress()
    report.errors = 3
    with PlainDisplay(out) as display:
        display.progress(report)
    assert ", 3 errors," in written(out)


def test_a_run_that_reports_nothing_shows_nothing() -> None:
    out = console()
    with PlainDisplay(out):
        pass
    assert written(out) == ""


@pytest.mark.parametrize(("total", "done"), [(64, "12/64 prompts"), (None, "12 prompts")])
def test_a_terminal_is_drawn_upon(total: int | None, done: str) -> None:
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.message("resuming")
        display.progress(progress(total=total))
        time.sleep(0.6)
    drawn = written(out)
    assert "starting" in drawn
    assert "detgen: resuming" in drawn
    for words in (done, "100 tokens/s", "16 live", "75% of drafts accepted", "8 roll-backs", "0:00:06 elapsed"):
        assert words in drawn
    assert drawn.rstrip().endswith("\x1b[2K"), "the drawing is cleared at the end"


def test_errors_are_red_lines_even_while_drawing() -> None:
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.error("no [such] file: " + "x" * 200)
    assert "\x1b[31mdetgen: error: no [such] file: " + "x" * 200 in written(out)


def test_quiet_shows_errors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    with QuietDisplay(out) as display:
        display.message("resuming")
        display.progress(progress())
        display.error("no such file")
        display.summary(summary())
    assert written(out) == "detgen: error: no such file\n"
    assert capsys.readouterr().out == ""


def test_the_display_suits_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_display()) is PlainDisplay
    assert type(open_display(quiet=True)) is QuietDisplay
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert type(open_display()) is LiveDisplay
    assert type(open_display(quiet=True)) is QuietDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_display()) is PlainDisplay


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary())
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {label.strip(): value.strip() for label, value in shown.items()} == {
        "status": "finished",
        "prompts": "64",
        "errors": "2",
        "tokens": "4,096",
        "tokens a second": "512.0 (0:00:08 in all)",
        "tokens a target pass": "16.00",
        "drafter model": "75.0% of 80 drafted tokens accepted in 20 rounds",
        "drafter none": "nothing drafted in 5 rounds",
        "roll-backs": "8",
        "recomputed": "0.5% of all tokens computed (20 drafted and thrown away)",
        "peak memory": "412.0 MiB",
        "output": "some folder/prompts-out",
        "SHA-256 of outputs.jsonl": "0123456789abcdef" * 4,
    }


def test_the_summary_of_a_resumed_run_without_guarantee(capsys: pytest.CaptureFixture[str]) -> None:
    fast = {"fast": DrafterStats(rounds=9, unverified=9)}
    print_summary(summary(resumed=10, samples=128, deterministic=False, drafters=fast, target_passes=0, seconds=0.0))
    shown = capsys.readouterr().out
    assert "10 samples had been finished" in shown
    assert "128" in shown
    assert "not guaranteed" in shown
    assert "9 tokens, not verified" in shown
    assert "a second" not in shown
    assert "target pass" not in shown
    assert "roll-backs" not in shown


def test_the_summary_of_a_run_that_was_done_already(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(status="already finished", resumed=64, seconds=0.0, target_passes=0))
    shown = capsys.readouterr().out
    assert "already finished: nothing was done; --overwrite starts afresh" in shown
    assert "resumed" not in shown
    assert "peak memory" not in shown


def test_long_values_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(output=Path("x" * 300)))
    assert "x" * 300 in capsys.readouterr().out
