from __future__ import annotations

from pathlib import Path

import pytest

from detgen.engine.request import Chunk
from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.outputs import Totals
from detgen.run import RunSummary
from detgen.run.interface import ThoughtCounts
from detgen.show.answers import print_summary

DRAFTS = DraftCounts(
    model=DrafterStats(rounds=20, drafted=80, accepted=60, corrected=8, bonus=12, rolled_back=12),
    none=DrafterStats(rounds=5, plain=5),
)


def summary(**changes: object) -> RunSummary:
    values: dict[str, object] = {
        "status": "finished",
        "output": Path("some folder/prompts-out"),
        "written": Totals(prompts=64, samples=64, errors=2),
        "fresh": Totals(tokens=4096, drafters=DRAFTS),
        "resumed": 0,
        "seconds": 8.0,
        "target_passes": 256,
        "peak_memory": 412 * 2**20,
        "sha256": "0123456789abcdef" * 4,
    }
    return RunSummary(**(values | changes))  # type: ignore[arg-type]


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary())
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {label.strip(): value.strip() for label, value in shown.items()} == {
        "status": "finished",
        "prompts": "64",
        "errors": "2",
        "tokens": "4,096",
        "tokens per second": "512.0 (0:00:08 in all)",
        "tokens per target pass": "16.00",
        "drafter model": "75.0% of 80 drafted tokens accepted in 20 rounds",
        "drafter none": "nothing drafted in 5 rounds",
        "roll-backs": "8",
        "recomputed": "0.5% of all tokens computed (20 drafted and thrown away)",
        "peak memory": "412.0 MiB",
        "output": "some folder/prompts-out",
        "SHA-256 of outputs.jsonl": "0123456789abcdef" * 4,
    }


def test_what_was_not_generated_again_is_not_said_to_be_of_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(resumed=1, reused=1))
    shown = capsys.readouterr().out
    assert "  1 sample of this run; " in shown
    assert "reused " in shown
    assert "  1 sample of earlier runs; " in shown
    assert "cache" not in shown


def test_the_summary_of_a_resumed_run_of_unverified_requests(capsys: pytest.CaptureFixture[str]) -> None:
    fast = DraftCounts(fast=DrafterStats(rounds=9, unverified=9))
    written, fresh = Totals(prompts=64, samples=128), Totals(tokens=4096, drafters=fast)
    print_summary(summary(resumed=10, written=written, fresh=fresh, target_passes=0, seconds=0.0))
    shown = capsys.readouterr().out
    assert "  10 samples of this run; the figures below leave them out\n" in shown
    assert "128" in shown
    assert "9 unverified tokens" in shown
    assert "per second" not in shown
    assert "target pass" not in shown
    assert "roll-backs" not in shown


def test_the_summary_of_a_run_that_was_done_already(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(status="already finished", resumed=64, seconds=0.0, target_passes=0))
    shown = capsys.readouterr().out
    assert "already finished: nothing was done; --overwrite starts over" in shown
    assert "resumed" not in shown
    assert "peak memory" not in shown


def test_long_values_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(output=Path("x" * 300)))
    assert "x" * 300 in capsys.readouterr().out


def test_a_model_that_thinks_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(thoughts=ThoughtCounts(1234, 20000, 3000, 15500)))
    shown = capsys.readouterr().out
    assert (
        "\nthoughts                  1,234 written, 20,000 chunks, 3,000 prefill rounds, 15,500 passes saved\n" in shown
    )
    print_summary(summary())
    assert "thoughts" not in capsys.readouterr().out


def test_chunks_are_drawn_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the figures, in columns, also where a character takes two of them; nothing is obeyed."""
    chunks = (
        Chunk(0, 4, "A coin's", None, None),
        Chunk(4, 8, "\u786c\u5e01\n", None, " heads"),
        Chunk(8, 12, "\x1b[31m", " heads", " tails"),
        Chunk(12, 13, " x", " tails", None),
    )
    print_summary(summary(chunks=chunks))
    drawn, empty, first = capsys.readouterr().out.partition("\n\nstatus ")
    assert empty
    assert first
    assert drawn.splitlines() == [
        "tokens  chunk       state of  thought",
        '0-3     "A coin\'s"  -         -',
        '4-7     "\u786c\u5e01\\n"    -         " heads"',
        '8-11    "\\x1b[31m"  " heads"  " tails"',
        '12      " x"        " tails"  -',
    ]
