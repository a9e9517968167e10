"""Signals that ask for an end, also while the engine is imported, which takes seconds."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from detgen.interruption import ending_signals, interrupt, interrupted_later

# A module in the engine's place is interrupted while it is imported and swallows that, as some libraries do. Another
# thread, as that of a live display, could take the signal.
SWALLOWING = """
import importlib.abc, importlib.machinery, os, signal, sys, threading, time

class Swallowing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "detgen.engine.engine" else None
    def exec_module(self, module):
        try:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
            time.sleep(0.2)
        except KeyboardInterrupt:
            print("swallowed")
        module.Engine = object

sys.meta_path.insert(0, Swallowing())
threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
signal.signal(signal.SIGHUP, signal.default_int_handler)
try:
    from detgen.engine import Engine
    print("imported")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_an_interruption_takes_effect_behind_the_import(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING, name], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupted"]


def test_a_handler_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a program which embeds Python; `signal.signal` could not put it back."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("the handler was replaced"))
    with interrupted_later():
        pass


def test_the_former_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted_later():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_signals(interrupt):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is interrupt
    finally:
        signal.signal(signal.SIGHUP, before)
