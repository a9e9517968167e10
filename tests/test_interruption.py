"""Ctrl-C while the engine is imported, which takes seconds."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from detgen.interruption import interrupted_later

# A module in the engine's place is interrupted while it is imported and swallows that, as some libraries do. Another
# thread, as that of a live display, could take the signal.
SWALLOWING = """
import importlib.abc, importlib.machinery, os, signal, sys, threading, time

class Swallowing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "detgen.engine.engine" else None
    def exec_module(self, module):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        except KeyboardInterrupt:
            print("swallowed")
        module.Engine = object

sys.meta_path.insert(0, Swallowing())
threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
try:
    from detgen.engine import Engine
    print("imported")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_an_interruption_takes_effect_behind_the_import() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True, check=True)
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
