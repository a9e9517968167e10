from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from detgen.worker import Worker, WorkerError, describe


def test_a_worker_answers_until_it_is_closed_and_keeps_its_noise_to_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Worker("some worker", {"SOME_SETTING": "3", "HOME": None}, log) as worker:
        pid = worker.call(os.getpid)
        assert pid != os.getpid()
        assert worker.call(os.getpid) == pid, "it stays alive"
        assert worker.call(os.getenv, "SOME_SETTING") == "3"
        assert worker.call(os.getenv, "HOME") is None
        worker.call(os.system, "echo noise")
        assert log.read_text() == "noise\n"
        with pytest.raises(WorkerError, match=r"FileNotFoundError: .*no-such-folder"):
            worker.call(os.listdir, "no-such-folder")
        assert worker.alive, "an error is no death"
    assert not worker.alive


def test_calls_are_answered_in_order() -> None:
    with Worker("some worker") as worker:
        worker.begin(os.getenv, "NONE", "first")
        worker.begin(os.getenv, "NONE", "second")
        assert [worker.finish(), worker.finish()] == ["first", "second"]


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [(os._exit, (3,), "exit status 3"), (os.abort, (), "ended by SIGABRT")],
)
def test_a_worker_that_dies_says_how(function: Any, arguments: tuple[Any, ...], said: str) -> None:
    with Worker("some worker") as worker:
        with pytest.raises(WorkerError, match=said):
            worker.call(function, *arguments)
        with pytest.raises(WorkerError, match=said):
            worker.call(os.getpid)


def test_errors_are_one_line() -> None:
    assert describe(RuntimeError("CUDA out of memory.\nTried to allocate")) == "out of memory (RuntimeError)"
    assert describe(MemoryError()) == "out of memory (MemoryError)"
    assert describe(ValueError("a\nb")) == "ValueError: a"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
