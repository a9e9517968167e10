"""The grid of peers: which rows a cell has, its ratios, and that a run goes on where another ended."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.rows import make_row

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peer_cells
from peer_cells import DRAFTERS, FEWER, FLOAT32, HALF, READING, Wanted, cells_of, ratio_line, report, wanted

from detgen.bench import peers
from detgen.bench.bench_results import load
from detgen.bench.config import BenchConfig
from detgen.bench.model_source import resolve
from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.progress import Unobserved


def test_a_ratio_is_of_the_same_round_and_over_the_best_of_the_others() -> None:
    rows = {
        "a": make_row("a", seconds=[1.0, 2.0, 1.0]),
        "b": make_row("b", seconds=[2.0, 4.0, 1.0]),
        "c": make_row("c", seconds=[0.8, 1.8, 0.9]),
        "d": make_row("d", seconds=[], error="it crashed"),
    }
    assert ratio_line(rows, Wanted("a", ("b", "c", "d"), 0.85)) == "     0.90 [0.80, 0.90]  a / c  wanted 0.85"
    assert ratio_line(rows, Wanted("a", ("c",), 0.97)) == "     0.90 [0.80, 0.90]  a / c  wanted 0.97  SHORT"
    assert ratio_line(rows, Wanted("a", ("b",), 0.0)) == "     2.00 [1.00, 2.00]  a / b"
    for nothing in (Wanted("a", ("d", "e"), 1.0), Wanted("d", ("a",), 1.0), Wanted("e", ("a",), 1.0)):
        assert ratio_line(rows, nothing) is None


def test_what_is_wanted_depends_on_the_cell() -> None:
    least = {(w.row, w.over): w.least for w in wanted("embedded", "code", 4)}
    assert least["detgen auto", FLOAT32] == 1.3
    assert least["detgen none", FLOAT32] == 1.0
    assert least["detgen auto", DRAFTERS[:3]] == 0.97
    assert least[HALF, ("detgen none",)] == 0.0, "a small model's weights stay in the caches"
    assert (HALF, ("detgen none",), 1.6) in wanted("0.5b", "code", 1)
    assert wanted("89m", "code@1.2", 16) == [("detgen auto", DRAFTERS[:3], 0.97)]
    assert all(w.row != "detgen auto" for w in wanted("89m", READING, 4))


class Fake:
    """Runs jobs in no time."""

    def __init__(self, *_: Any) -> None:
        self.jobs: list[tuple[str, Job]] = []

    def run(self, contender: Contender, job: Job) -> Outcome:
        self.jobs.append((contender.label, job))
        n = len(job.prompts)
        return Outcome([[1] * p.output for p in job.prompts], 1.0, [0.1] * n, [0.5] * n, cpu_seconds=1.5)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(peers, "version", lambda package: "1.0")
    monkeypatch.setattr(peer_cells, "Processes", lambda *_: found)
    return found


def test_cells_have_their_rows_and_their_prompts(fake: Fake, tmp_path: Path) -> None:
    config = BenchConfig(random_weights="tiny", full=True, fractions=(100.0,), max_tokens=3)
    target = resolve(config, Unobserved())
    source = ModelSource(target.engine, "tiny", 0, 64, tmp_path, native=True, random_draft=True)
    code, hot, reading = cells_of(["code", "code@1.2", READING], [16], config, target, source)
    labels = [c.label for c in code.contenders]
    assert set(labels) == {*DRAFTERS, HALF, "detgen none, q8", "detgen auto, q8", *FLOAT32, *FEWER}
    assert len({c.process for c in code.contenders}) == 8
    half = code.contenders[labels.index(HALF)]
    assert (half.fraction, half.precision, half.fewer_bits) == (1.0, "float32", False)
    assert [c.label for c in hot.contenders] == list(DRAFTERS)
    assert (code.job(half).temperature, hot.job(half).temperature) == (0.0, 1.2)
    assert [p.output for p in code.workload.prompts] == [3] * 16
    assert [(len(p.tokens), p.output) for p in reading.workload.prompts] == [(512, 1)] * 4
    assert "detgen auto" not in [c.label for c in reading.contenders]


def test_each_cell_is_kept_and_a_run_goes_on_where_another_ended(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> list[str]:
        fake.jobs.clear()
        monkeypatch.setattr(sys, "argv", ["peer_cells.py", "--models", "tiny", "--threads", "1", *arguments])
        peer_cells.main()
        return [f"{job.batch_size}" for _, job in fake.jobs if len(job.prompts) > 1]

    out = ("-o", str(tmp_path), "--seconds", "0")
    assert set(run("--batches", "1", "--workloads", "code", *out)) == {"1"}
    text = capsys.readouterr().out
    assert "tiny, 1 thread, code, batch 1, tokens/s:" in text
    assert "64.0  openvino default (fewer bits), 1.50 CPU s/s, rounds: 1" in text
    assert "1.00 [1.00, 1.00]  detgen none / openvino f32  wanted 1.00" in text
    assert set(run("--batches", "1,4", "--workloads", "code", *out)) == {"4"}
    kept = load(tmp_path / "tiny-1-threads.json")
    assert {(row.workload, row.batch_size) for row in kept.rows} == {("code", 1), ("code", 4)}
    assert "WRONG" not in capsys.readouterr().out


def test_reading_is_told_in_prompt_tokens_and_failures_are_told() -> None:
    row = make_row(workload=READING, prompt_tokens=2048, output_tokens=4, seconds=[2.0], cpu_seconds=[4.0])
    failed = replace(row, label="openvino f32", seconds=[], error="it crashed")
    lines = list(report("29m", 2, [row, failed]))
    assert lines[0] == "29m, 2 threads, reading, batch 4, prompt tokens/s:"
    assert lines[1] == "      1,024.0  detgen none, 2.00 CPU s/s, rounds: 1"
    assert lines[2] == "       FAILED  openvino f32: it crashed"
    assert len(lines) == 3, "no ratio has both sides"
