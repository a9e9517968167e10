from __future__ import annotations

import errno
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from helpers.rows import make_results, make_row

from detgen.bench import roofline
from detgen.bench.bench_results import load, save
from detgen.bench.noise_levels import apart, compare
from detgen.bench.roofline import measure_roof, place_all, place_under_roof
from detgen.errors import BenchError


def test_bench_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = make_row(same_bytes=(3, 4, 1), agreement=(4, 4), counts={"drafted": 3}, over_none=[1.0, 1.1, 0.9])
    row.cpu_seconds, row.others = [1.5, 1.6, 1.4], [(0.1, 2.0), (0.0, 2.2), (-0.01, 1.8)]
    row.weights, row.fewer_bits, row.reference = "q8", True, "detgen none, q8"
    results = make_results(row, make_row("vllm plain", error="it crashed", seconds=[], ttft=[], tpot=[]))
    save(results, tmp_path / "bench.json")
    assert load(tmp_path / "bench.json") == results


def test_a_bench_json_that_cannot_be_written_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the end of the process in the middle of writing would."""
    results, path = make_results(make_row()), tmp_path / "bench.json"
    save(results, path)

    def half(path: Path, text: str, **options: object) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(BenchError, match=r"cannot write .*bench\.json: No space left on device"):
            save(make_results(), path)
    assert load(path) == results


KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "intel-xeon-vnni-2-cores" / "embedded.json"


def test_a_kept_bench_json_is_compared() -> None:
    old, new = load(KEPT), load(KEPT)
    assert compare(old, new) == []
    row = next(row for row in new.rows if row.label == "detgen none" and row.batch_size == 16)
    row.seconds = [2 * s for s in row.seconds]
    (change,) = compare(old, new)
    assert "detgen none" in change
    assert "(-50%)" in change


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 99}', '{"format": 1, "rows": []}'])
def test_a_file_that_is_no_bench_json_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=r"old\.json"):
        load(path)


def test_a_run_has_not_changed_from_itself() -> None:
    results = make_results(make_row(), make_row("transformers generate"))
    assert compare(results, results) == []


def test_changes_beyond_noise_are_told() -> None:
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
        "sample, batch 4, gone x: is no longer measured",
    ]
    new.environment = new.environment | {"versions": {"torch": "2.14.0"}, "threads": 4}
    assert compare(old, new)[:2] == ["threads: 2 before, 4 now", "torch: 2.13.0 before, 2.14.0 now"]


def test_an_error_that_is_new_is_a_change() -> None:
    lines = compare(make_results(make_row()), make_results(make_row(seconds=[], error="it crashed")))
    assert lines == ["sample, batch 4, detgen none: error: none before, it crashed now"]


def test_ranges_that_touch_within_the_margin_are_no_change() -> None:
    assert not apart([100.0, 102.0], [106.0, 110.0])
    assert apart([100.0, 102.0], [116.0, 120.0])


def test_the_verdict_on_batch_sizes_reads_as_a_sentence() -> None:
    assert make_row().verdict == "-"
    assert make_row(same_bytes=(4, 4, 16)).verdict == "yes (with 16)"
    assert make_row(same_bytes=(1, 4, 16)).verdict == "no: 3 of 4 (with 16)"


def test_shares_of_the_roof() -> None:
    row = make_row(passes=10)
    place_under_roof(row, median(row.seconds), 1e8, {"copy_bytes": 1e10, "product_operations": 1e11}, "float32")
    assert row.bandwidth_share == pytest.approx(10 * 1e8 * 4 / 1e10)
    assert row.arithmetic_share == pytest.approx(2 * 1e8 * 140 / 1e11)
    unknown = make_row("openvino default", precision="default", passes=10)
    place_under_roof(unknown, 1.0, 1e8, {"copy_bytes": 1e10, "product_operations": 1e11}, "float32")
    assert unknown.bandwidth_share is None
    assert unknown.arithmetic_share is None
    stored = make_row(weights="bfloat16", passes=10)
    place_under_roof(stored, median(row.seconds), 1e8, {"copy_bytes": 1e10, "product_operations": 1e11}, "float32")
    assert stored.bandwidth_share == pytest.approx(row.bandwidth_share / 2), "half of the bytes"
    assert stored.arithmetic_share == row.arithmetic_share


def test_the_roof_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SECONDS", 0.01)
    roof = measure_roof("cpu", "float32", 1)
    assert 1e8 < roof["copy_bytes"] < 1e13
    assert 1e8 < roof["product_operations"] < 1e14


def test_a_roof_is_not_that_of_memory_that_nobody_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the first call is, and those while others were busy: the best of several later ones counts."""
    now = 0.0
    taken = iter([9.0, 0.6, 0.5, 0.02, 0.7, *[0.03] * 100])

    def copy() -> None:
        nonlocal now
        now += next(taken)

    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: now))
    assert roofline._best(copy, "cpu") == pytest.approx(0.02)
    taken = iter([0.01, *[0.03] * 100])
    assert roofline._best(copy, "cpu") == pytest.approx(0.03), "the first call is not timed"


def test_a_roof_below_what_a_row_reaches_is_no_bound() -> None:
    """Ten passes over a million weights of four bytes in 0.01 seconds: 4 GB/s."""
    rows = [make_row(seconds=[0.01], passes=10), make_row("detgen ngram", seconds=[0.02], passes=10)]
    whole = {"copy_bytes": 8e9, "product_operations": 1e14}
    assert place_all(rows, 1e6, whole, "float32") == (whole, [])
    assert [row.bandwidth_share for row in rows] == pytest.approx([0.5, 0.25])
    bounds, (note,) = place_all(rows, 1e6, whole | {"copy_bytes": 1.4e9}, "float32")
    assert bounds == {"product_operations": 1e14}
    assert note.startswith("a copy reached 1.4 GB/s when the machine was measured, but detgen none reaches 4.0: it is")
    assert [row.bandwidth_share for row in rows] == [None, None]
    assert rows[0].arithmetic_share
    assert place_all(rows, 1e6, {}, "float32") == ({}, [])
    rows[0].arithmetic_share = None
    bounds, (note,) = place_all(rows[:1], None, whole, "float32")
    assert (bounds, note[:41]) == (whole, "each token takes some of the model's expe")
    assert (rows[0].bandwidth_share, rows[0].arithmetic_share) == (None, None)
