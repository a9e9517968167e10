from __future__ import annotations

from pathlib import Path

from helpers.rows import make_results, make_row
from rich.console import Console

from detgen.show.bench_view import cells, render, span, write_markdown


def test_the_fastest_row_stands_first_and_failures_last() -> None:
    slow, fast = make_row("transformers generate", seconds=[2.0]), make_row(seconds=[1.0])
    failed = make_row("vllm plain", seconds=[], error="out of memory")
    ((heading, (speeds, *_), remarks),) = cells(make_results(failed, slow, fast))
    assert [line[0] for line in speeds] == ["setting", "detgen none", "transformers generate", "vllm plain"]
    assert heading == "sample, batch 4: 4 requests, 40 tokens in, 100 out"
    assert remarks == ["FAILED vllm plain: out of memory"]


def test_markdown_has_every_row_its_figures_and_what_is_wrong(tmp_path: Path) -> None:
    good = make_row(
        counts={"drafted": 20, "accepted": 15, "corrected": 3, "rows": 50},
        passes=40,
        same_bytes=(4, 4, 1),
        over_none=[1.2],
        memory=2**30,
        bandwidth_share=0.5,
        cpu_seconds=[2.0, 2.2, 1.8],
        weights="bfloat16",
    )
    bad = make_row("transformers generate", seconds=[4.0], same_bytes=(1, 4, 1), wrong="something")
    failed = make_row("vllm plain", seconds=[], error="out of memory")
    write_markdown(make_results(good, bad, failed), tmp_path / "bench.md")
    text = (tmp_path / "bench.md").read_text()
    first = next(line for line in text.splitlines() if line.startswith("| detgen none"))
    assert "| 100 [91, 111] | 140 | 1.20 |" in first
    assert "| 0.1 / 0.2 | 10 / 20 | yes (with 1) |" in first
    assert "| 1 [0.9, 1.1] | 2 [1.8, 2.2] | bfloat16 | 1.00 | 50% |" in text, "wall time, CPU seconds"
    assert "| 2.50 | 75% | 3 | 5 (5%) |" in text
    assert "no: 3 of 4 (with 1)" in text
    assert "**WRONG transformers generate: something**" in text
    assert "| transformers generate (WRONG) |" in text
    assert "| vllm plain | float32 | failed | - |" in text
    assert "**FAILED vllm plain: out of memory**" in text
    assert "- vllm skipped: not installed" in text
    assert "GPU memory" not in text, "a column without values is left out"


def test_rows_that_compute_in_fewer_bits_say_so() -> None:
    full, less = make_row(), make_row("llama.cpp q8_0", precision="q8_0", fewer_bits=True, seconds=[2.0])
    results = make_results(full, less)
    ((_, (speeds, *_), _),) = cells(results)
    assert [line[0] for line in speeds] == ["setting", "detgen none", "llama.cpp q8_0 (fewer bits)"]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(render(results))
    assert "fewer bits: weights, arithmetic or cache have fewer bits" in captured.get()
    with console.capture() as captured:
        console.print(render(make_results(full)))
    assert "fewer bits" not in captured.get()


def test_the_terminal_shows_the_same() -> None:
    console = Console(width=160, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(render(make_results(make_row(), make_row("vllm plain", seconds=[], error="no memory"))))
    assert "100 [91, 111]" in captured.get()
    assert "FAILED vllm plain: no memory" in captured.get()
    assert "10.0 GB/s" in captured.get()


def test_a_span_shows_median_and_range() -> None:
    assert span([3.0, 1.0, 2.0], "{:.0f}") == "2 [1, 3]"
    assert span([3.0], "{:.0f}") == "3"
    assert span([], "{:.0f}") == "-"
