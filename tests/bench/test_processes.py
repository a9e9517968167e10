from __future__ import annotations

import os
from pathlib import Path

import pytest

from detgen.bench.child import describe, peak_memory
from detgen.bench.interface import Job, ModelSource, Prompt, Variant
from detgen.bench.processes import Child, PeerError, Processes, call_once


def test_a_child_answers_until_it_is_closed_and_keeps_its_noise_to_itself(tmp_path: Path) -> None:
    child = Child("some child", {"SOME_SETTING": "3"}, tmp_path)
    try:
        pid = child.ask("call", "os:getpid", {})
        assert pid != os.getpid()
        assert child.ask("call", "os:getpid", {}) == pid, "it stays alive"
        assert child.ask("call", "os:getenv", {"key": "SOME_SETTING"}) == "3"
        child.ask("call", "os:system", {"command": "echo noise"})
        assert child.log.read_text() == "noise\n"
        with pytest.raises(PeerError, match=r"FileNotFoundError: .*no-such-folder"):
            child.ask("call", "os:listdir", {"path": "no-such-folder"})
        assert child.alive, "an error is no death"
    finally:
        child.close()
    assert not child.alive


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [("os:_exit", {"status": 3}, "exit status 3"), ("os:abort", {}, "ended by SIGABRT")],
)
def test_a_child_that_dies_says_how(function: str, arguments: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=said):
        call_once(function, arguments, 1, tmp_path)


def test_a_dead_process_is_started_again(source: ModelSource, tmp_path: Path) -> None:
    job = Job((Prompt((1, 2, 3), 4),), 1, (True,))
    variant = Variant("generate", "float32", "transformers")
    with Processes(source, (1,), tmp_path) as processes:
        first = processes.run("transformers", variant, job)
        with pytest.raises(PeerError, match="exit status 1"):
            processes._children["transformers"].ask("call", "os:_exit", {"status": 1})
        assert processes.run("transformers", variant, job).tokens == first.tokens
        assert first.memory is not None
        assert first.memory > 50 << 20
    assert not processes._children["transformers"].alive


def test_errors_are_one_line() -> None:
    assert describe(RuntimeError("CUDA out of memory.\nTried to allocate")) == "out of memory (RuntimeError)"
    assert describe(MemoryError()) == "out of memory (MemoryError)"
    assert describe(ValueError("a\nb")) == "ValueError: a"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_peak_memory_is_that_of_this_process() -> None:
    assert 10 << 20 < peak_memory() < 1 << 40


def test_what_detgen_sets_for_itself_is_not_set_for_its_peers(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    with Processes(source, (1,), tmp_path) as processes:
        for peer, spins in (("detgen", "1000"), ("transformers", None)):
            processes.load(peer, Variant("none" if peer == "detgen" else "generate", "float32", peer))
            assert processes._children[peer].ask("call", "os:getenv", {"key": "GOMP_SPINCOUNT"}) == spins
