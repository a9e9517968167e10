"""The suite for a GPU, tried on the CPU: its stages run, its limits hold, and what a stage found stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_suite
from gpu import running, stages
from gpu.notebook import Notebook
from gpu.running import Suite, SuiteError, ratios
from gpu.stages import STAGES, Stage

SCRIPT = Path(gpu_suite.__file__)
NAMES = [stage.name for stage in STAGES]


def run(folder: Path, *names: str) -> dict[str, Any]:
    """The results of some stages, or of all, as a user runs them."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")
    chosen = [part for name in names for part in ("--stage", name)]
    command = [sys.executable, str(SCRIPT), "--tiny", "--minutes", "15", "-o", str(folder), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "gpu_suite.json").read_text())["stages"]
    text = (folder / "gpu_suite.txt").read_text()
    for name, stage in found.items():
        assert (stage["status"], stage["failed"]) == ("done", [])
        assert f"== {name} " in text
        assert all(f"  {line}" in done.stdout for line in stage["lines"])
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_suite.json", "gpu_suite.txt"]
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stages that are quick."""
    return run(tmp_path_factory.mktemp("tiny"), "kernels", "kernel-times", "passes")


@pytest.mark.slow
def test_kernels_are_right_and_their_times_taken(measured: dict[str, Any]) -> None:
    found = measured["kernels"]["found"]
    assert all(each["equal"] for each in found.values())
    times = measured["kernel-times"]["found"]
    for stage in (found, times):
        kinds = {name.split(",")[0].split()[0] for name in stage}
        assert kinds == {"attention", "norm", "layer", "activation", "rotation", "gated", "linear"}
    assert all(each["seconds"] > 0 for each in times.values())


@pytest.mark.slow
def test_passes_have_their_floors(measured: dict[str, Any]) -> None:
    found = measured["passes"]["found"]
    (one, three), prompt = (found[f"batch {n}, context 100"] for n in (1, 3)), found["prompt of 8 rows"]
    assert found["other bits"] == []
    per_request = 101 * 2 * 2 * 2 * 16 * 4  # positions, layers, keys and values, KV heads, head size, bytes
    assert three["bytes"] - one["bytes"] == 2 * per_request
    assert one["bytes"] - per_request == 4 * found["model"]["weights"]
    assert three["operations"] > one["operations"] > 2 * found["model"]["weights"]
    assert prompt["eager"] > 0
    assert all(each["equal"] for each in (one, three, prompt))


@pytest.mark.slow
def test_all_stages(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert list(found) == NAMES
    speeds = {**found["generations"]["found"], **found["generations-peer"]["found"]}
    for who in ("detgen none", "detgen auto", "transformers-continuous generate_batch"):
        for lengths in ("equal", "mixed"):
            assert speeds[f"{who}, {lengths}"]["tokens_per_second"] > 0
    assert found["quick"]["found"]["answer"]["equal"]
    assert "skipped" in found["cuda-tests"]["lines"][-1]


# Stands for a module of the package.
FAKE = """
import subprocess, sys, time

def measure(book, asked):
    book.note("first", 1, "found before")
    with book.part("a part"):
        raise ValueError("broken")
    with book.part("another"):
        book.note("second", 2)
    if asked.stage == "dies":
        import os
        os.abort()
    if asked.stage == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        book.note("child", child.pid)
        time.sleep(100)
"""


@pytest.fixture
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a copy of the package with a module that fails in its ways."""
    package = tmp_path / "here" / "gpu"
    package.mkdir(parents=True)
    for path in Path(stages.__file__).parent.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    (package / "fake.py").write_text(FAKE)
    with (package / "stages.py").open("a") as file:
        file.write('\nSTAGES = tuple(Stage(n, 1, "fake", n) for n in ("well", "hangs", "dies"))\n')
    monkeypatch.setattr(running, "_HERE", package.parent)
    monkeypatch.setattr(running, "_LEAST", 3.0)


@pytest.fixture
def _signals() -> Iterator[None]:
    """Handlers of signals, given back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_fakes")
def test_what_fails_or_hangs_leaves_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = [Stage(name, 1, "fake", name) for name in ("well", "hangs", "dies")]
    lacking = Stage("lacks", 1, "fake", "lacks", packages=("no_such_package",))
    suite = Suite(tmp_path / "out", "a device", "tiny", tiny=True)
    assert not suite.run([*fakes, lacking], 0.01)
    printed = capsys.readouterr().out
    for name, status in (
        ("well", "failed: exit status 1"),
        ("hangs", "stopped at its limit of 3 s"),
        ("dies", f"failed: exit status {-signal.SIGABRT}"),
    ):
        assert f"== {name} ({name}): {status}" in printed
    assert printed.count("  found before\n") == 3
    assert printed.count("  FAILED a part: ValueError: broken\n") == 3
    assert "== lacks (lacks): skipped: no_such_package not installed, 0.0 s\n" in printed
    assert not list((tmp_path / "out").glob("*.log"))


@pytest.mark.usefixtures("_fakes")
def test_a_stage_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    result = Suite(tmp_path / "out", "a device", "tiny", tiny=True)._run(Stage("hangs", 1, "fake", "hangs"), 3.0)
    assert result["found"]["second"] == 2
    child = result["found"]["child"]
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child of a stage runs on")


def test_an_interruption_keeps_what_was_found(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--stage", "environment", "--stage", "ceilings", "-o", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        part = tmp_path / "out" / "environment.part.json"
        while not (part.exists() and "packages" in part.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert (process.returncode, said) == (130, "gpu_suite: interrupted; what was measured is kept\n")
    found = json.loads((tmp_path / "out" / "gpu_suite.json").read_text())["stages"]
    assert list(found) == ["environment"]
    assert found["environment"]["status"] in ("interrupted", "done"), "it may have ended before the signal came"
    assert "packages" in found["environment"]["found"]
    assert not list((tmp_path / "out").glob("*.part.*"))


@pytest.mark.usefixtures("_fakes", "_signals")
def test_an_interruption_after_a_stage_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_commit", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(gpu_suite, "STAGES", [Stage(name, 1, "fake", name) for name in ("well", "hangs")])
    monkeypatch.setattr(running, "STAGES", gpu_suite.STAGES)
    assert gpu_suite.main(["--tiny", "-o", str(tmp_path / "out")]) == 130
    found = json.loads((tmp_path / "out" / "gpu_suite.json").read_text())["stages"]
    assert list(found) == ["well"]
    assert found["well"]["found"] == {"first": 1, "second": 2}


def test_stages_of_earlier_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suite, "_run", lambda self, stage, limit: made | {"found": {"limit": limit}})
    made = {"found": {}, "lines": [f"a line of {tmp_path.name}"], "failed": [], "status": "done", "seconds": 1.0}
    first, second = STAGES[1], STAGES[0]
    assert Suite(tmp_path, "a", "tiny", tiny=True).run([first], 1.0)
    assert Suite(tmp_path, "a", "tiny", tiny=True).run([second, first], 1.0)
    found = json.loads((tmp_path / "gpu_suite.json").read_text())["stages"]
    assert list(found) == [second.name, first.name]
    limits = [found[stage.name]["found"]["limit"] for stage in (second, first)]
    assert limits[0] == pytest.approx(60 * second.seconds / (first.seconds + second.seconds), abs=0.1)
    assert limits[1] == pytest.approx(60, abs=0.1), "what the one before did not need"


def test_ratios() -> None:
    def of(**speeds: float) -> dict[str, Any]:
        return {"found": {name: {"tokens_per_second": speed} for name, speed in speeds.items()}}

    own = {"detgen none, equal": 300.0, "detgen none, mixed": 270.0, "detgen auto, equal": 330.0}
    own_found = of(**own)
    own_found["found"]["detgen none, equal, warming up"] = 2.0
    both = {"generations": own_found, "generations-peer": of(**{"peer x, equal": 150.0})}
    assert list(ratios(both)) == [
        "detgen none, equal: 2.00 times generate_batch",
        "detgen none: mixed lengths at 0.90 of the speed of equal ones",
        "detgen auto, equal: 2.20 times generate_batch",
    ]
    assert list(ratios({})) == []


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_suite.main(["--stage", "ceilings"]) == 2
    assert capsys.readouterr().err == "gpu_suite: torch finds no CUDA device here; --tiny tries all stages on the CPU\n"
    assert gpu_suite.main(["--tiny", "--random-weights", "nosuch"]) == 2
    assert "there is no configuration 'nosuch'" in capsys.readouterr().err
    (tmp_path / "gpu_suite.json").write_text("[]")
    assert gpu_suite.main(["--tiny", "-o", str(tmp_path)]) == 2
    assert "is no result of this program" in capsys.readouterr().err
    for wrong in (["--minutes", "0"], ["--minutes", "nan"], ["--stage", "nosuch"]):
        with pytest.raises(SystemExit) as end:
            gpu_suite.main(["--tiny", *wrong])
        assert end.value.code == 2
    with pytest.raises(SuiteError):
        Suite(tmp_path, "a", "tiny", tiny=True)


def test_the_stages_fit_into_nine_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [*NAMES, "together"]
    assert sum(stage.seconds for stage in STAGES) <= 9 * 60
    assert gpu_suite.folder_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3"


def test_a_notebook_is_whole_at_any_time(tmp_path: Path) -> None:
    book = Notebook(tmp_path / "part.json")
    assert json.loads((tmp_path / "part.json").read_text()) == {"found": {}, "lines": [], "failed": []}
    book.note("a", [1], "one")
    with book.part("b"):
        raise RuntimeError("first line\nsecond")
    found = json.loads((tmp_path / "part.json").read_text())
    assert found == {"found": {"a": [1]}, "lines": ["one"], "failed": ["b: RuntimeError: first line"]}
