from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from detgen.bench import processor_time
from detgen.bench.processor_time import CpuClock, Others, OthersClock

ON_LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
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


@ON_LINUX
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


class Proc:
    """A /proc of its own: what processors did, and the processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stat(self, *processors: tuple[int, ...]) -> None:
        """Columns of each processor, in hundredths of seconds."""
        lines = ["cpu  1 2 3", *(f"cpu{i} " + " ".join(map(str, columns)) for i, columns in enumerate(processors))]
        (self._folder / "stat").write_text("\n".join([*lines, "intr 5 5"]) + "\n")

    def process(self, number: int, parent: int, *times: int, name: str = "python") -> None:
        """A process with its user, system, and ended children's times."""
        (self._folder / str(number)).mkdir(exist_ok=True)
        fields = ["R", str(parent), *"123456789", *map(str, times), "20", "0"]
        (self._folder / str(number) / "stat").write_text(f"{number} ({name}) {' '.join(fields)}")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    monkeypatch.setattr(processor_time, "PROC", tmp_path)
    monkeypatch.setattr(processor_time, "_TICK", 0.01)
    monkeypatch.setattr(processor_time, "_cores", lambda: {0, 2})
    monkeypatch.setattr(processor_time, "_own_seconds", lambda: 0.0)
    return Proc(tmp_path)


def test_what_is_left_of_the_processors_time_is_others(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle columns and processors that this process may not use do not count; stolen time does, that of guests once."""
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    own = os.getpid()
    proc.stat((100, 0, 0, 900, 50, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (0, 0, 0, 5, 5, 0, 0, 0, 0, 0))
    proc.process(own, 1, 500, 0, 0, 0)
    proc.process(7, own, 10, 10, 0, 0, name="a b) R 1")
    proc.process(8, 7, 0, 0, 0, 0)
    proc.process(9, 1, 0, 0, 0, 0)
    clock = OthersClock()
    proc.stat((200, 10, 20, 990, 90, 1, 2, 7, 60, 10), (99,) * 10, (50, 0, 0, 70, 9, 0, 0, 0, 0, 0))
    proc.process(7, own, 50, 20, 0, 5)
    proc.process(8, 7, 20, 10, 0, 0)
    proc.process(9, 1, 100, 0, 0, 0)
    others = clock.read()
    assert others is not None
    assert others.there_were == pytest.approx(4.0), "two processors for two seconds"
    assert others.seconds == pytest.approx(1.40 + 0.50 - 0.55 - 0.30), "without its children's"
    assert others.share == pytest.approx(others.seconds / 4)
    assert others.disturb


def test_nothing_is_said_where_the_system_tells_nothing(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.stat((0,) * 10, (0,) * 10, (0,) * 10)
    assert OthersClock().read() is None, "zeros, as in some containers"
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name == "psutil":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    (processor_time.PROC / "stat").unlink()
    assert OthersClock().read() is None, "no /proc, and psutil is not installed"
    assert CpuClock().seconds() >= 0.0


def test_where_there_is_no_proc_psutil_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.setattr(processor_time, "PROC", tmp_path / "none")
    clock, cpu = OthersClock(), CpuClock()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu.seconds() > 0.25
        others = clock.read()
        child.communicate(b"\n")
    assert others is not None
    assert others.there_were > 0.3


@ON_LINUX
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
