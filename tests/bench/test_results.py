from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from rich.console import Console

from detgen.bench.comparing import apart, compare
from detgen.bench.results import load, save
from detgen.bench.roofline import measure_roofline, place_under_roof
from detgen.bench.rows import Results, Row
from detgen.errors import BenchError
from detgen.show.bench_tables import cells, render, same_bytes, span, write_markdown

MakeRow = Callable[..., Row]
MakeResults = Callable[..., Results]


def test_bench_json_is_read_as_it_was_written(make_row: MakeRow, make_results: MakeResults, tmp_path: Path) -> None:
    row = make_row(same_bytes=(3, 4, 1), agreement=(4, 4), counts={"drafted": 3}, over_fast=[1.0, 1.1, 0.9])
    results = make_results(row, make_row("vllm plain", error="it crashed", seconds=[], ttft=[], tpot=[]))
    save(results, tmp_path / "bench.json")
    assert load(tmp_path / "bench.json") == results


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 99}', '{"format": 1, "rows": []}'])
def test_a_file_that_is_no_bench_json_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=r"old\.json"):
        load(path)


def test_the_fastest_row_stands_first_and_failures_last(make_row: MakeRow, make_results: MakeResults) -> None:
    slow, fast = make_row("transformers generate", seconds=[2.0]), make_row(seconds=[1.0])
    failed = make_row("vllm plain", seconds=[], error="out of memory")
    ((heading, rows),) = cells(make_results(failed, slow, fast))
    assert rows == [fast, slow, failed]
    assert heading == "sample, batch 4: 4 requests, 40 tokens in, 100 out"


def test_markdown_has_every_row_its_figures_and_what_is_wrong(
    make_row: MakeRow, make_results: MakeResults, tmp_path: Path
) -> None:
    good = make_row(
        counts={"drafted": 20, "accepted": 15, "corrected": 3, "rows": 50, "padding_rows": 5},
        passes=40,
        same_bytes=(4, 4, 1),
        over_fast=[1.2],
        memory=2**30,
        bandwidth_share=0.5,
    )
    bad = make_row("transformers generate", seconds=[4.0], same_bytes=(1, 4, 1), wrong="something")
    failed = make_row("vllm plain", seconds=[], error="out of memory")
    write_markdown(make_results(good, bad, failed), tmp_path / "bench.md")
    text = (tmp_path / "bench.md").read_text()
    first = next(line for line in text.splitlines() if line.startswith("| detgen none"))
    assert "| 100 [91, 111] | 140 | 1.20 |" in first
    assert "| 0.1 / 0.2 | 10 / 20 | yes (with 1) |" in first
    assert "| 2.50 | 75% | 3 | 5 (5%) | 10% | 1.00 | 50% |" in text
    assert "no: 3 of 4 (with 1)" in text
    assert "**WRONG transformers generate: something**" in text
    assert "| transformers generate (WRONG) |" in text
    assert "| vllm plain | float32 | failed | - |" in text
    assert "**FAILED vllm plain: out of memory**" in text
    assert "- vllm skipped: not installed" in text
    assert "GPU memory" not in text, "a column without values is left out"


def test_the_terminal_shows_the_same(make_row: MakeRow, make_results: MakeResults) -> None:
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


def test_a_run_has_not_changed_from_itself(make_row: MakeRow, make_results: MakeResults) -> None:
    results = make_results(make_row(), make_row("transformers generate"))
    assert compare(results, results) == []


def test_changes_beyond_noise_are_told(make_row: MakeRow, make_results: MakeResults) -> None:
    old = make_results(make_row(), make_row("a b"), make_row("c d", same_bytes=(4, 4, 1)), make_row("gone x"))
    new = make_results(
        make_row(seconds=[0.95, 1.0, 1.05]),
        make_row("a b", seconds=[2.0, 2.1, 1.9]),
        make_row("c d", same_bytes=(3, 4, 1), error=None),
        make_row("new x"),
    )
    lines = compare(old, new)
    assert lines == [
        "sample, batch 4, a b: 100 tokens/s before, 50 now (-50%)",
        "sample, batch 4, c d: same bytes: yes (with 1) before, no: 1 of 4 (with 1) now",
        "sample, batch 4, new x: was not measured before",
        "sample, batch 4, gone x: is not measured any more",
    ]
    new.environment = new.environment | {"versions": {"torch": "2.14.0"}, "threads": 4}
    assert compare(old, new)[:2] == ["threads: 2 before, 4 now", "torch: 2.13.0 before, 2.14.0 now"]


def test_an_error_that_is_new_is_a_change(make_row: MakeRow, make_results: MakeResults) -> None:
    lines = compare(make_results(make_row()), make_results(make_row(seconds=[], error="it crashed")))
    assert lines == ["sample, batch 4, detgen none: error: none before, it crashed now"]


def test_ranges_that_touch_within_the_margin_are_no_change() -> None:
    assert not apart([100.0, 102.0], [106.0, 110.0])
    assert apart([100.0, 102.0], [116.0, 120.0])


def test_same_bytes_reads_as_a_sentence(make_row: MakeRow) -> None:
    assert same_bytes(make_row()) == "-"
    assert same_bytes(make_row(same_bytes=(4, 4, 16))) == "yes (with 16)"


def test_shares_of_the_roof(make_row: MakeRow) -> None:
    row = make_row(passes=10)
    place_under_roof(row, median(row.seconds), 1e8, {"copy_bytes": 1e10, "product_operations": 1e11}, "float32")
    assert row.bandwidth_share == pytest.approx(10 * 1e8 * 4 / 1e10)
    assert row.arithmetic_share == pytest.approx(2 * 1e8 * 140 / 1e11)
    unknown = make_row("openvino default", precision="default", passes=10)
    place_under_roof(unknown, 1.0, 1e8, {"copy_bytes": 1e10, "product_operations": 1e11}, "float32")
    assert unknown.bandwidth_share is None
    assert unknown.arithmetic_share is None


def test_the_roof_is_measured() -> None:
    roof = measure_roofline("cpu", "float32", 1)
    assert 1e8 < roof["copy_bytes"] < 1e13
    assert 1e8 < roof["product_operations"] < 1e14
