"""The import of the engine, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A module in the engine's place, which is interrupted while it is imported and swallows that, as some libraries do.
SWALLOWING = """
import importlib.abc, importlib.machinery, signal, sys

class Swallowing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "detgen.engine.engine" else None
    def exec_module(self, module):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("swallowed")
        module.Engine = object

sys.meta_path.insert(0, Swallowing())
try:
    from detgen.engine import Engine
    print("imported")
except KeyboardInterrupt:
    print("interrupted", not signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal masks")
def test_an_interruption_takes_effect_behind_the_import() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupted", "True"]
