from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detgen.bench.interface import BenchConfig
from detgen.bench.results import load
from detgen.bench.session import bench, fitted_workloads
from detgen.bench.target import resolve
from detgen.bench.workloads import SYNTHETIC
from detgen.errors import BenchError


def test_a_small_benchmark_from_its_settings_to_its_files(tmp_path: Path, told: Any) -> None:
    config = BenchConfig(
        output=tmp_path / "out",
        random_weights="tiny",
        peers=("detgen", "transformers"),
        batch_sizes=(2,),
        requests=3,
        max_tokens=8,
        rounds=1,
        fractions=(50.0, 100.0),
        acceptances=(0.8,),
    )
    results = bench(config, told)
    rows = {row.label: row for row in results.rows}
    assert set(rows) == {
        "detgen fast path", "detgen none", "detgen none, 67% verified", "detgen self", "detgen self, 67% verified",
        "detgen ngram", "detgen auto", "detgen auto, 67% verified", "detgen synthetic 0.8",
        "transformers generate",
    }  # fmt: skip
    for row in rows.values():
        assert row.error is None
        assert row.wrong is None
        assert row.output_tokens == 24
        assert len(row.seconds) == 1
        assert row.same_bytes is not None
        assert row.memory is not None
        assert row.over_transformers
    assert rows["detgen none"].same_bytes == (3, 3, 1)
    assert rows["detgen none, 67% verified"].agreement == (2, 2)
    assert rows["detgen synthetic 0.8"].synthetic
    assert load(tmp_path / "out" / "bench.json").rows == results.rows
    stored = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {"torch", "transformers"} <= stored["environment"]["versions"].keys()
    assert "detgen synthetic 0.8" in (tmp_path / "out" / "bench.md").read_text()
    assert told.steps[-1][0] + 1 == told.steps[-1][1], "the last run was expected"


def test_sequences_beyond_the_context_are_refused(tmp_path: Path, told: Any) -> None:
    config = BenchConfig(output=tmp_path, random_weights="tiny", workloads=("4096x1024",), scale=1.0)
    with pytest.raises(BenchError, match="the model's context is 2048; use a smaller --scale"):
        bench(config, told)


def test_the_whole_grid_fits_a_short_context() -> None:
    """A scale that nobody asked for gives way, for each workload alone and for all batch sizes alike."""
    config = BenchConfig(random_weights="tiny", full=True, max_tokens=16)
    target = replace(resolve(config), context=300)
    cells, workloads = fitted_workloads(config, target)
    assert {w.name for w in workloads} == {"sample", *SYNTHETIC}
    assert all(w.longest <= 300 for w, _ in cells)
    scales = {(w.name, w.origin.partition("scale ")[2].partition(",")[0]) for w, _ in cells}
    assert scales == {
        ("sample", ""), ("1024x256", "0.0625"), ("1024x1024", "0.0625"), ("4096x1024", "0.03125"),
        ("sharegpt", "0.0625"), ("arxiv", "0.0078125"),
    }  # fmt: skip


def test_a_context_that_no_scale_fits_is_refused() -> None:
    config = BenchConfig(random_weights="tiny", workloads=("1024x256",))
    with pytest.raises(BenchError, match="sequences of 6 tokens, the model's context is 5"):
        fitted_workloads(config, replace(resolve(config), context=5))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, told: Any) -> None:
    with pytest.raises(BenchError, match="no-such-model"):
        bench(BenchConfig(output=tmp_path, target=str(tmp_path / "no-such-model")), told)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, told: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="choose another folder with -o"):
        bench(BenchConfig(output=tmp_path / "file" / "out", random_weights="tiny", peers=("detgen",)), told)


@pytest.mark.cuda
def test_a_small_benchmark_on_a_gpu(tmp_path: Path, told: Any) -> None:
    config = BenchConfig(
        output=tmp_path,
        random_weights="tiny",
        device="cuda",
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
