from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import thorough
from helpers.rows import make_results, make_row
from typer.testing import CliRunner, Result

import detgen.bench.benchmark
from detgen import cli
from detgen.bench.bench_results import Results, Stopped, load, save
from detgen.bench.config import BenchConfig
from detgen.engine.config import EngineConfig
from detgen.errors import BenchError


def results(seconds: float = 1.0) -> Results:
    return make_results(make_row(seconds=[seconds]))


def invoke(*arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})
    return runner.invoke(cli.app, ["bench", *arguments], prog_name="detgen")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """What the command asks for; nothing is measured."""
    seen: list[BenchConfig] = []

    def bench(config: BenchConfig, observer: Any) -> Results:
        seen.append(config)
        observer.message("measuring")
        return results()

    monkeypatch.setattr(detgen.bench.benchmark, "bench", bench)
    return seen


def test_help_names_every_option_and_has_examples() -> None:
    out = invoke("--help").stdout
    for option in (
        *("--workload", "--requests", "--batch-size", "--deterministic-fraction", "--scale", "--random-weights"),
        *(
            "--synthetic-acceptance",
            "--peer-python",
            "--compare",
            "--quick",
            "--full",
            "--output",
            "--peer",
            "--target",
        ),
    ):
        assert option in out
    assert "Examples:" in out
    assert "llama-89m" in out


def test_options_reach_the_benchmark(configs: list[BenchConfig], tmp_path: Path) -> None:
    result = invoke(
        *("--workload", "sharegpt", "--workload", "sample", "--batch-size", "1,4", "--requests", "3"),
        *("--deterministic-fraction", "2,50", "--synthetic-acceptance", "0.5,0.9", "--random-weights", "tiny"),
        *(
            "--peer",
            "detgen",
            "--full",
            "--scale",
            "0.5",
            "-o",
            str(tmp_path),
            "--rounds",
            "2",
            "--device",
            "cpu",
            "--threads",
            "1",
        ),
    )
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert config.workloads == ("sharegpt", "sample")
    assert config.batch_sizes == (1, 4)
    assert config.fractions == (2.0, 50.0)
    assert config.acceptances == (0.5, 0.9)
    assert (config.random_weights, config.peers, config.full) == ("tiny", ("detgen",), True)
    assert (config.scale, config.output, config.rounds) == (0.5, tmp_path, 2)
    assert config.engine == EngineConfig(device="cpu", threads=1)
    assert "detgen none" in result.stdout
    assert f"written: {tmp_path}/bench.json" in result.stdout.replace("\n", "")
    assert "| detgen none |" in (tmp_path / "bench.md").read_text()
    assert "detgen: measuring" in result.stderr


def test_quick_is_the_default_and_quiet_is_quiet(configs: list[BenchConfig], tmp_path: Path) -> None:
    result = invoke("--quiet", "-o", str(tmp_path))
    assert configs == [BenchConfig(output=tmp_path)]
    assert result.stderr == ""


def test_compare_tells_what_changed(configs: list[BenchConfig], tmp_path: Path) -> None:
    save(results(), tmp_path / "same.json")
    save(results(2.0), tmp_path / "slow.json")
    out = ("-o", str(tmp_path))
    assert "no change beyond noise" in invoke(*out, "--compare", str(tmp_path / "same.json")).stdout
    assert "50 tokens/s before, 100 now (+100%)" in invoke(*out, "--compare", str(tmp_path / "slow.json")).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch-size", "1,x"), "list of whole numbers"),
        (("--synthetic-acceptance", "much"), "list of numbers"),
        (("--compare", "no-such.json"), "no-such.json: no such file"),
        (("--device", "tpu"), "auto, cpu, cuda"),
        (("--threads", "0"), "--threads must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    configs: list[BenchConfig], arguments: tuple[str, ...], said: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert not configs


@pytest.mark.parametrize(("error", "code"), [(BenchError("no such workload"), 2), (KeyboardInterrupt(), 130)])
def test_refusals_and_interruptions_have_their_exit_status(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench(config: BenchConfig, observer: Any) -> Results:
        raise error

    monkeypatch.setattr(detgen.bench.benchmark, "bench", bench)
    result = invoke()
    assert result.exit_code == code
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_interruption_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(config: BenchConfig, observer: Any) -> Results:
        raise Stopped(results())

    monkeypatch.setattr(detgen.bench.benchmark, "bench", bench)
    result = invoke("-o", str(tmp_path))
    assert result.exit_code == 130
    assert "interrupted; what was measured so far is kept" in result.stderr
    assert "detgen none" in result.stdout
    assert f"written: {tmp_path}/bench.json, {tmp_path}/bench.md" in result.stdout
    assert "| detgen none |" in (tmp_path / "bench.md").read_text()


@thorough
def test_a_real_benchmark_that_is_stopped_keeps_its_cells(tmp_path: Path) -> None:
    """The process is told to end as soon as its file has a measured row; bench/test_benchmark.py has other signals."""
    command = [sys.executable, "-m", "detgen", "bench", "--peer", "transformers", "--batch-size", "2,1"]
    command += ["--random-weights", "tiny", "--max-tokens", "4", "--rounds", "1000", "--requests", "2"]
    command += ["--threads", "1", "-o", str(tmp_path)]
    stored = tmp_path / "bench.json"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            while running.poll() is None and not stored.exists():
                time.sleep(0.05)
            running.send_signal(signal.SIGTERM)
            out, err = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 130, err
    results = load(stored)
    assert not results.complete
    assert all(row.error is None and row.seconds and row.cpu_seconds and row.memory for row in results.rows)
    assert results.roofline
    assert results.notes[-1].startswith("not finished: 1 of 2 cells")
    assert "interrupted; what was measured so far is kept" in err
    assert "sample, batch 2" in out
    assert "not finished: 1 of 2 cells" in (tmp_path / "bench.md").read_text()
