from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import detgen.bench.session
from detgen import cli
from detgen.bench.interface import BenchConfig
from detgen.bench.results import save
from detgen.bench.rows import Results, Row
from detgen.errors import BenchError

ENVIRONMENT = {
    "created": "",
    "detgen": "0.1.0",
    "device": "a processor",
    "threads": 2,
    "versions": {},
    "models": {"target": "embedded:target", "dtype": "float32"},
}


def results(seconds: float = 1.0) -> Results:
    row = Row("sample", 4, "detgen", "detgen none", "float32", False, 1.0, 4, 40, 100, seconds=[seconds])
    row.ttft = row.tpot = [(0.1, 0.2)]
    return Results(dict(ENVIRONMENT), {}, {}, [row], [])


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

    monkeypatch.setattr(detgen.bench.session, "bench", bench)
    return seen


def test_help_names_every_option_and_has_examples() -> None:
    out = invoke("--help").stdout
    for option in (
        *("--workload", "--requests", "--batch-size", "--deterministic-fraction", "--scale", "--random-weights"),
        *("--synthetic-acceptance", "--figures", "--compare", "--quick", "--full", "--output", "--peer", "--target"),
    ):
        assert option in out
    assert "Examples:" in out
    assert "llama-89m" in out


def test_options_reach_the_benchmark(configs: list[BenchConfig], tmp_path: Path) -> None:
    result = invoke(
        *("--workload", "sharegpt", "--workload", "sample", "--batch-size", "1,4", "--requests", "3"),
        *("--deterministic-fraction", "2,50", "--synthetic-acceptance", "0.5,0.9", "--random-weights", "tiny"),
        *("--peer", "detgen", "--full", "--scale", "0.5", "-o", str(tmp_path), "--rounds", "2", "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert config.workloads == ("sharegpt", "sample")
    assert config.batch_sizes == (1, 4)
    assert config.fractions == (2.0, 50.0)
    assert config.acceptances == (0.5, 0.9)
    assert (config.random_weights, config.peers, config.full) == ("tiny", ("detgen",), True)
    assert (config.scale, config.output, config.rounds, config.device) == (0.5, tmp_path, 2, "cpu")
    assert "detgen none" in result.stdout
    assert f"written: {tmp_path}/bench.json" in result.stdout.replace("\n", "")
    assert "detgen: measuring" in result.stderr


def test_quick_is_the_default_and_quiet_is_quiet(configs: list[BenchConfig]) -> None:
    result = invoke("--quiet")
    assert configs == [BenchConfig()]
    assert result.stderr == ""


def test_compare_tells_what_changed(configs: list[BenchConfig], tmp_path: Path) -> None:
    save(results(), tmp_path / "same.json")
    save(results(2.0), tmp_path / "slow.json")
    assert "no change beyond noise" in invoke("--compare", str(tmp_path / "same.json")).stdout
    assert "50 tokens/s before, 100 now (+100%)" in invoke("--compare", str(tmp_path / "slow.json")).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch-size", "1,x"), "list of whole numbers"),
        (("--synthetic-acceptance", "much"), "list of numbers"),
        (("--compare", "no-such.json"), "no-such.json: no such file"),
        (("--device", "tpu"), "auto, cpu, cuda"),
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

    monkeypatch.setattr(detgen.bench.session, "bench", bench)
    result = invoke()
    assert result.exit_code == code
    assert len(result.stderr.strip().splitlines()) == 1
