"""The child's side of a peer: a process that loads models and runs jobs for as long as its parent asks.

What libraries print goes to a log file, so that the parent's screen stays its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detgen.bench.interface import Job, ModelSource, Outcome, Peer, Variant
from detgen.bench.peers import make_peer


def serve(connection: Connection, environment: Mapping[str, str | None], log: Path) -> None:
    """Answer requests until the parent hangs up; each answer is (True, what it is) or (False, what went wrong)."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    worker = _Worker()
    while True:
        try:
            kind, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send((True, getattr(worker, kind)(*arguments)))
        except KeyboardInterrupt:
            return
        except BaseException as error:
            sys.stderr.flush()
            connection.send((False, describe(error)))


class _Worker:
    """What a child can be asked to do."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def load(self, peer: str, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        if peer not in self._peers:
            self._peers[peer] = make_peer(peer)
        self._peers[peer].load(source, variant, batch_sizes)

    def run(self, peer: str, variant: Variant, job: Job) -> Outcome:
        _forget_peak()
        outcome = self._peers[peer].run(variant, job)
        outcome.memory = peak_memory()
        if outcome.gpu_memory is None:
            outcome.gpu_memory = _peak_gpu_memory()
        return outcome

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call a function by `module:name`."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(**arguments)


def describe(error: BaseException) -> str:
    """One line of what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    kind = type(error).__name__
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        return f"out of memory ({kind})"
    return f"{kind}: {lines[0]}" if lines[0] else kind


def _forget_peak() -> None:
    """Start the peaks of memory anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Peak resident bytes of this process since they were last forgotten; elsewhere than on Linux since its start."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_gpu_memory() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    # Nothing where the library computes in processes of its own.
    return int(torch.cuda.max_memory_reserved()) or None
