from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from detgen.bench import processor_time
from detgen.bench.processor_time import CpuClock, Others, OthersClock

SPIN = "import time\nwhile time.process_time() < 0.3: pass\nprint('spun', flush=True)\ninput()"


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_threads_count_and_sleep_does_not() -> None:
    clock = CpuClock()
    thread = threading.Thread(target=spin, args=(0.2,))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert 0.19 < clock.seconds() < 0.35


def test_children_count_while_they_run_and_when_they_have_ended() -> None:
    clock = CpuClock()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        running = clock.seconds()
        assert running > 0.25, "it waits, and has not ended"
        child.stdin.write(b"\n")
    assert clock.seconds() >= running - 0.02, "its time is not lost, nor counted twice"
    assert clock.seconds() < running + 0.25


class Child(NamedTuple):
    """A child of this process, as psutil gives it."""

    seconds: list[float]  # user, system, and those of its own that have ended

    def cpu_times(self) -> list[float]:
        return [*self.seconds, 99.0]


def processor(**seconds: float) -> Any:
    """Times of a processor, as psutil gives them."""
    return namedtuple("Times", seconds)(**seconds)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What psutil tells: `processors` and `children`."""
    told = SimpleNamespace(processors=[], children=[])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: told.processors)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: told.children))
    monkeypatch.setattr(processor_time, "_cores", lambda: {0, 2})
    monkeypatch.setattr(processor_time, "_own_seconds", lambda: 0.0)
    return told


def test_what_is_left_of_the_processors_time_is_others(told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle columns and processors that this process may not use do not count; stolen time does, that of guests once."""
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    told.processors = [processor(user=1.0, idle=9.0, iowait=0.5), processor(user=1.0), processor(user=0.0, idle=0.1)]
    told.children = [Child([0.1, 0.1, 0.0, 0.0]), Child([0.0] * 4)]
    clock = OthersClock()
    told.processors = [
        processor(user=2.0, nice=0.1, system=0.2, idle=9.9, iowait=0.9, irq=0.01, softirq=0.02, steal=0.07, guest=0.6),
        processor(user=9.9),
        processor(user=0.5, idle=0.7, guest_nice=0.1),
    ]
    told.children = [Child([0.5, 0.2, 0.0, 0.05]), Child([0.2, 0.1, 0.0, 0.0])]
    others = clock.read()
    assert others is not None
    assert others.there_were == pytest.approx(4.0), "two processors for two seconds"
    assert others.seconds == pytest.approx(1.40 + 0.50 - 0.55 - 0.30), "without its children's"
    assert others.share == pytest.approx(others.seconds / 4)
    assert others.disturb


def test_nothing_is_said_where_the_system_tells_nothing(told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    told.processors = [processor(user=0.0, idle=0.0)] * 3
    assert OthersClock().read() is None, "zeros, as in some containers"

    def refuse(**_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert OthersClock().read() is None
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert CpuClock().seconds() == 0.0, "where a peer runs, it may not be installed"


def test_a_stranger_that_spins_is_seen() -> None:
    """It is nobody's child: the process that started it has ended."""
    forever = "import time\nend = time.monotonic() + 1.2\nwhile time.monotonic() < end: pass"
    starter = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {forever!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", starter], check=True)
    clock = OthersClock()
    time.sleep(0.8)
    others = clock.read()
    assert others is not None
    assert others.seconds > 0.2


def test_a_share_is_of_all_processors_and_small_ones_do_not_disturb() -> None:
    assert Others(1.0, 4.0).share == 0.25
    assert Others(-0.1, 4.0).share == 0.0
    assert Others(9.0, 4.0).share == 1.0
    assert Others(0.0, 0.0).share == 0.0
    assert [Others(seconds, 4.0).disturb for seconds in (-0.1, 0.0, 0.4, 0.44, 0.46, 2.0)] == [False] * 4 + [True] * 2
    assert not Others(0.05, 0.1).disturb, "no more than noise"
