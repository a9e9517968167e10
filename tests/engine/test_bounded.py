"""A stranger's function, called within bounds: it loops, takes all memory, writes without end, dies, or is good."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from detgen import Engine, EngineError
from detgen.engine import bounded
from detgen.engine.bounded import Bounded, BoundsError
from detgen.engine.rendering import chat_renderer, render_chat
from detgen.engine.request import Request


def loop(*_: object) -> str:
    while True:
        pass


def fail(*_: object) -> str:
    raise ValueError("no such role")


@pytest.mark.parametrize(
    ("function", "seconds", "said"),
    [
        (loop, 0.2, "more than 0.2 seconds"),
        (lambda: str(7 ** (10**9)), 0.2, "more than 0.2 seconds"),  # one operation, which no signal handler stops
        (lambda: "a" * 10**10, 5.0, "GiB of memory"),
        (lambda: "a" * (bounded.CHARACTERS + 1), 5.0, "writes more than"),
        (fail, 5.0, "^no such role$"),
        (lambda: os._exit(3), 5.0, r"broke down \(3\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 5.0, "GiB of memory"),
        (os.abort, 5.0, "GiB of memory"),
    ],
)
def test_what_goes_over_a_bound(function: Callable[..., Any], seconds: float, said: str) -> None:
    call = Bounded(function, seconds)
    for _ in range(2):  # the next call finds another copy
        with pytest.raises(BoundsError, match=said):
            call()


def test_what_is_good_comes_back_from_any_thread() -> None:
    """Texts with any character; calls of several threads do not mix; a copy that ended is replaced."""
    call = Bounded(lambda a, b="": f"{a}\ud800\n{b}", 1.0)
    found: dict[int, str] = {}

    def several(n: int) -> None:
        for _ in range(20):
            found[n] = call(n, b="x" * 100_000)

    threads = [threading.Thread(target=several, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"{n}\ud800\n{'x' * 100_000}" for n in range(4)}
    os.kill(call._child, signal.SIGKILL)
    os.waitpid(call._child, 0)
    call(1)


def test_waiting_costs_no_time_of_the_bound() -> None:
    """Processor time counts: a machine that is busy with something else makes no error of a good call."""
    call = Bounded(lambda: time.sleep(0.5) or "done", 0.2)  # type: ignore[func-returns-value]
    assert call() == "done"


def test_a_copy_ends_when_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE", 0.05)
    call = Bounded(lambda: str(os.getpid()))
    first = call()
    assert first != str(os.getpid())
    time.sleep(0.3)
    assert call() != first


@pytest.mark.parametrize("endless", [True, False])
def test_what_takes_too_much_whatever_it_is_given_is_given_up(tmp_path: Path, endless: bool) -> None:
    """By its kind; what takes too much of one thing only is tried with others, so that their order has no say."""
    asked = tmp_path / "asked"

    def function(kind: str, size: int) -> str:
        with asked.open("a") as file:
            file.write(f"{kind}{size} ")
        return loop() if kind == "b" and (endless or size > 1) else "good"

    call = Bounded(function, 0.2, least=lambda kind, size: ((kind, 0), {}))
    assert call("a", 5) == "good"
    for size in (5, 4, 1):
        if size > 1 or endless:
            with pytest.raises(BoundsError, match=r"more than 0\.2 seconds"):
                call("b", size)
        else:
            assert call("b", size) == "good"
    assert call("a", 5) == "good"
    assert asked.read_text() == ("a5 b5 b0 a5 " if endless else "a5 b5 b0 b4 b0 b1 a5 ")


def test_no_room_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no error of what was asked: the run ends, and can be resumed."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    request = Request("chat", 1, messages=[{"role": "user", "content": "a"}])
    tokenizer = AutoTokenizer.from_pretrained("detgen/demo_models/target")
    former = set(os.listdir("/dev/fd")), dict(os.environ)
    monkeypatch.setattr("os.fork", fork)
    with pytest.raises(EngineError, match="cannot start another process: Resource temporarily unavailable"):
        render_chat(tokenizer, "x", request, chat_renderer(tokenizer))
    assert (set(os.listdir("/dev/fd")), dict(os.environ)) == former


def test_nothing_is_said_at_exit() -> None:
    """Though modules are kept beyond their time, as libraries in C do, so that nothing is left to call."""
    keep = "for m in (bounded, sys.modules['__main__']): ctypes.pythonapi.Py_IncRef(ctypes.py_object(m))"
    make = "call = bounded.Bounded(lambda: 'good'); print(call())"
    script = "\n".join(["import ctypes, sys", "from detgen.engine import bounded", make, keep])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("good\n", "")


def test_a_copy_holds_no_file_open(tmp_path: Path) -> None:
    """A lock that another process wants is free when this process has let go of it."""
    with (tmp_path / "lock").open("w") as file:
        call = Bounded(lambda: " ".join(os.listdir("/dev/fd")))
        assert str(file.fileno()) not in call().split()


def test_arguments_that_cannot_be_sent() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BoundsError, match="recursion"):
        Bounded(lambda _: "")(nested)
    while nested:  # freed level by level, not by recursion
        nested = nested[0]


def test_an_endless_template_is_tried_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of thousands of chats."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", endless)
    monkeypatch.setattr(engine._encoder.render, "_seconds", 0.2)
    monkeypatch.setattr(engine._encoder.render, "_given_up", set())
    answers, asked = [], Bounded._asked
    monkeypatch.setattr(Bounded, "_asked", lambda self, call: answers.append(asked(self, call)) or answers[-1])
    chats = [Request(str(i), i, messages=[{"role": "user", "content": str(i)}]) for i in range(50)]
    assert all("more than 0.2 seconds" in str(completion.error) for completion in engine.generate(chats))
    assert len([answer for answer in answers if answer is not None]) == 2  # None: a copy of before had ended
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert engine.generate(chats[:1])[0].error is None


def test_a_template_that_prints_the_day_is_known(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not engine.dated
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ strftime_now('%d %b %Y') }}{{ messages }}")
    assert engine.dated


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 seconds"),
        ("{{ 'a' * 10**10 }}", "GiB of memory"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "GiB of memory",
        ),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_chat_template_ends_its_own_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, template: str, said: str | None
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    monkeypatch.setattr(engine._encoder.render, "_seconds", 0.3)
    requests = [
        Request("chat", 1, messages=[{"role": "user", "content": "def f("}]),
        Request("text", 2, prompt="def f("),
    ]
    chat, text = engine.generate(requests)
    assert text.error is None
    if said is None:
        assert chat.token_ids == text.token_ids
    else:
        assert chat.error is not None
        assert said in chat.error
