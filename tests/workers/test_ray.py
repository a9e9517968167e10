"""Real workers on a real Ray: the bytes of a single process, whoever is killed, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import invoke
from helpers.examples import thorough
from helpers.fakes import Watcher, content, manifest_of
from helpers.real_workers import ENGINE, PARAMS, RAY, WORKER, alive, family, one_process, write_prompts

import detgen
from detgen.engine.config import EngineConfig
from detgen.errors import EngineError
from detgen.run import EngineLike, RunConfig, ScoreConfig, run
from detgen.workers.cluster import RayCluster
from detgen.workers.team import WorkersEngine
from detgen.workers.worker_config import WorkersConfig

pytestmark = [
    # Not imported here: a local Ray is told by the environment, before that, to keep to itself.
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two workers with the embedded models, shared by the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
            patch.setenv(name, "")  # as it was, in the end
        patch.setattr("detgen.workers.cluster.usable_cores", lambda: 2)
        made = RayCluster(WorkersConfig(2), ENGINE, Watcher())
        yield made
        made.close()
    assert not alive(family(os.getpid()), *RAY)


@pytest.fixture
def workers(cluster: RayCluster) -> Callable[[EngineConfig], EngineLike]:
    return lambda config: WorkersEngine(cluster, config.batch_size, Watcher())


@thorough
def test_runs_and_scores_have_the_bytes_of_a_single_process(
    tmp_path: Path, workers: Callable[[EngineConfig], EngineLike]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 60)
    alone = one_process(prompts, tmp_path / "one")
    summary = run(RunConfig(str(prompts), tmp_path / "two", PARAMS, ENGINE), Watcher(), build_engine=workers)
    assert content(tmp_path / "two")["outputs.jsonl"] == alone["outputs.jsonl"]
    assert summary.written.errors == 3
    assert manifest_of(tmp_path / "two")["profile"] == manifest_of(tmp_path / "one")["profile"]

    scores = Path(detgen.__file__).parents[1] / "sample_prompts" / "scores.jsonl"
    for name, build in (("one", None), ("two", workers)):
        run(ScoreConfig(str(scores), tmp_path / f"{name}-scores", ENGINE), Watcher(), build_engine=build)
    one, two = ((tmp_path / f"{name}-scores" / "outputs.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two
    assert b"logprobs" in one


@thorough
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, cluster: RayCluster) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 150)
    alone = one_process(prompts, tmp_path / "one")
    watcher = Watcher()
    killed: list[int] = []

    def build(config: EngineConfig) -> EngineLike:
        made = WorkersEngine(cluster, config.batch_size, watcher)
        killed.append(alive(family(os.getpid()), WORKER)[0])
        return made

    class Killer(Watcher):
        def progress(self, progress: Any) -> None:
            if progress.done > 20 and killed:
                os.kill(killed.pop(), signal.SIGKILL)

    run(RunConfig(str(prompts), tmp_path / "two", PARAMS, ENGINE), Killer(), build_engine=build)
    assert content(tmp_path / "two")["outputs.jsonl"] == alone["outputs.jsonl"]
    assert [text for text in watcher.messages if re.match(r"worker [12] on \S+ died; it is started again, and ", text)]


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=rf"^no Ray cluster answers at 127.0.0.1:{port} \(Connection refused\); start"
    ):
        RayCluster(WorkersConfig(ray=f"127.0.0.1:{port}"), ENGINE, Watcher())
    assert time.monotonic() - began < 5


def test_no_cluster_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineError, match=r"^no Ray cluster answers at auto \(Connection refused\)"):
        RayCluster(WorkersConfig(ray="auto"), ENGINE, Watcher())


def test_without_ray_the_remedy_is_said(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    code = "import sys; sys.modules['ray'] = None; from detgen.__main__ import main; main()"
    command = [sys.executable, "-c", code, "run", str(prompts), "-o", str(tmp_path / "out"), "--workers", "2", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        "detgen: error: --workers and --ray need Ray, which is not installed: pip install 'detgen[ray]'" in done.stderr
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", "0"), "--workers must be a whole number of at least 1, got 0"),
        (("--ray", "head"), "--ray must be auto or HOST:PORT, such as 10.0.0.1:6379, got 'head'"),
        (("--workers", "2", "--target", "/nowhere"), "/nowhere"),
    ],
)
def test_what_is_wrong_is_said_before_ray_is_loaded(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    for command in ("run", "score"):
        result = invoke(command, str(prompts), "-o", str(tmp_path / "out"), *options)
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
