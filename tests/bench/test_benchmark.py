from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detgen.bench import benchmark, cells, measuring, processes
from detgen.bench.bench_results import Stopped, load
from detgen.bench.benchmark import bench
from detgen.bench.config import BenchConfig
from detgen.bench.peer_interface import Contender, Job, Outcome, Peer
from detgen.bench.processor_time import Others
from detgen.engine.config import EngineConfig
from detgen.errors import BenchError, EngineError
from detgen.interruption import ending_signals, interrupt


class Here(AbstractContextManager["Here"]):
    """A worker in this process, which has its libraries already; cli/test_bench_command.py has real ones."""

    alive = True
    peer: Peer | None = None

    def __init__(self, *_: object) -> None:
        pass

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        processes._peer = self.peer
        try:
            return function(*arguments)
        finally:
            self.peer, processes._peer = processes._peer, None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.alive = False


def test_a_small_benchmark_from_its_settings_to_its_files(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of which others take a half."""
    monkeypatch.setattr(processes, "Worker", Here)
    for module in (benchmark, measuring):
        monkeypatch.setattr(module, "OthersClock", lambda: SimpleNamespace(read=lambda: Others(1.0, 2.0)))
    config = BenchConfig(
        output=tmp_path / "out",
        random_weights="tiny",
        peers=("detgen",),
        batch_sizes=(2,),
        requests=3,
        max_tokens=8,
        rounds=1,
        fractions=(50.0, 100.0),
    )
    results = bench(config, told)
    rows = {row.label: row for row in results.rows}
    assert set(rows) == {
        *("detgen none", "detgen none, 67% verified", "detgen self", "detgen ngram", "detgen auto"),
        *("detgen auto, 67% verified",),
        *("detgen none, q8", "detgen auto, q8"),
    }  # fmt: skip
    for row in rows.values():
        assert row.error is None
        assert row.wrong is None
        assert row.output_tokens == 24
        assert len(row.seconds) == 1
        assert row.same_bytes is not None
        assert row.memory is not None
        assert row.over_none
        assert len(row.cpu_seconds) == 1
        assert 0 < row.cpu_seconds[0] < 100 * row.seconds[0]
        assert row.others == [(1.0, 2.0)]
    assert rows["detgen none"].same_bytes == (3, 3, 1)
    assert rows["detgen none, 67% verified"].agreement == (2, 2)
    assert load(tmp_path / "out" / "bench.json").rows == results.rows
    stored = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {"torch", "transformers"} <= stored["environment"]["versions"].keys()
    assert stored["environment"]["others_before"] == 0.5
    before, after = (note for note in results.notes if "other processes" in note)
    assert "this machine is busy" in before
    assert "sample, batch 2 (50% of" in after
    assert [told.messages.count(note) for note in (before, after)] == [1, 1]
    assert stored["notes"] == results.notes
    assert results.complete
    assert stored["complete"]
    assert results.roofline
    assert told.steps[-1].done == told.steps[-1].total, "the last run was expected"


class Stopping:
    """Runs jobs in no time; the process is told to end at the first run of the second cell's second round."""

    calls = 0
    number = signal.SIGTERM

    def __init__(self, *_: object) -> None:
        pass

    def run(self, contender: Contender, job: Job) -> Outcome:
        self.calls += 1
        if job.batch_size == 1 and self.calls == 6:
            os.kill(os.getpid(), self.number)
        n = len(job.prompts)
        return Outcome([[7] * 4] * n, 1.0, [0.1] * n, [0.3] * n, 10, {})

    def close(self) -> None:
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_kept_when_it_is_stopped(
    number: signal.Signals, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each round the file has what was measured so far, and says that it is not all."""
    monkeypatch.setattr(Stopping, "number", number)
    monkeypatch.setattr(benchmark, "Processes", Stopping)
    monkeypatch.setattr(benchmark, "_roof", lambda *_: {"copy_bytes": 1e10, "product_operations": 1e11})
    monkeypatch.setattr(cells, "contenders_at", lambda *_: (Contender("detgen", "none", "float32", "a", fraction=1.0),))
    config = BenchConfig(
        output=tmp_path, random_weights="tiny", peers=("detgen",), batch_sizes=(2, 1), max_tokens=4, rounds=2
    )
    with pytest.raises(Stopped) as stopped, ending_signals(interrupt):
        bench(config, told)
    results = stopped.value.results
    assert [(row.batch_size, len(row.seconds)) for row in results.rows] == [(2, 2), (1, 1)]
    assert all(row.bandwidth_share for row in results.rows)
    assert not results.complete
    assert results.notes[-1] == "not finished: 2 of 2 cells, the last one (sample, batch 1) after round 1"
    kept = load(tmp_path / "bench.json")
    assert (kept.rows, kept.notes, kept.roofline) == (results.rows, results.notes, results.roofline)
    assert sorted(os.listdir(tmp_path)) == ["bench.json", "logs"]


def test_sequences_beyond_the_context_are_refused(tmp_path: Path, told: Any) -> None:
    config = BenchConfig(output=tmp_path, random_weights="tiny", workloads=("4096x1024",), scale=1.0)
    with pytest.raises(BenchError, match="the model's context is 2048; use a smaller --scale"):
        bench(config, told)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, told: Any) -> None:
    with pytest.raises(EngineError, match="no-such-model"):
        bench(BenchConfig(output=tmp_path, engine=EngineConfig(target=str(tmp_path / "no-such-model"))), told)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, told: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="choose another folder with -o"):
        bench(BenchConfig(output=tmp_path / "file" / "out", random_weights="tiny", peers=("detgen",)), told)


@pytest.mark.cuda
def test_a_small_benchmark_on_a_gpu(tmp_path: Path, told: Any) -> None:
    config = BenchConfig(
        output=tmp_path,
        random_weights="tiny",
        engine=EngineConfig(device="cuda"),
        peers=("detgen", "transformers"),
        batch_sizes=(4,),
        scale=1 / 64,
        workloads=("1024x256",),
        requests=8,
        rounds=1,
    )
    results = bench(config, told)
    assert [(row.label, row.error, row.wrong) for row in results.rows if row.error or row.wrong] == []
    assert all(row.precision == "bfloat16" for row in results.rows)
    assert all(row.gpu_memory for row in results.rows)
