"""The parent's side of the peers: one child process for each process name, kept alive between its runs.

A process of its own keeps libraries from disturbing each other, gives each its own peak of memory, and makes a crash
an error of the rows that it has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from detgen.bench.child import serve
from detgen.bench.interface import Job, ModelSource, Outcome, Variant


class PeerError(Exception):
    """A peer that could not do what it was asked; the message is one line."""


class Child:
    """A process that answers one request at a time.

    Args:
        name: of the process and its log.
        environment: variables that it is started with; without those that are None.
        logs: folder for the log.
    """

    def __init__(self, name: str, environment: Mapping[str, str | None], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / (re.sub(r"[^\w.-]+", "-", name) + ".log")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # No daemon: some peers start processes of their own.
        self._process = context.Process(target=serve, args=(theirs, environment, self.log), name=name, daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, kind: str, *arguments: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            PeerError: the child could not do it, or has died.
        """
        try:
            self._connection.send((kind, arguments))
            good, answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(10)
            raise PeerError(self._death()) from None
        if not good:
            raise PeerError(answer)
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.is_alive()

    def close(self) -> None:
        """Hang up; it ends by itself, or is ended after some seconds."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                why = ", as the system does when memory runs out" if name == "SIGKILL" else ""
                return f"its process was ended by {name}{why} (see {self.log})"
        return f"its process ended with exit status {code} (see {self.log})"


class Processes:
    """The children of a benchmark, started when they are first needed and again if they have died.

    Args:
        source: the models.
        batch_sizes: all that will be asked for.
        logs: folder for what they print.
    """

    def __init__(self, source: ModelSource, batch_sizes: tuple[int, ...], logs: Path) -> None:
        self._source = source
        self._batch_sizes = batch_sizes
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._loaded: set[tuple[str, str, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.close()

    def run(self, peer: str, variant: Variant, job: Job) -> Outcome:
        """Run a job in the variant's process, loading what it needs first.

        Raises:
            PeerError: it failed.
        """
        self.load(peer, variant)
        outcome: Outcome = self._children[variant.process].ask("run", peer, variant, job)
        return outcome

    def load(self, peer: str, variant: Variant) -> None:
        """Have a variant ready.

        Raises:
            PeerError: it failed.
        """
        child = self._children.get(variant.process)
        if child is None or not child.alive:
            if child is not None:
                child.close()
                self._loaded = {key for key in self._loaded if key[0] != variant.process}
            environment: dict[str, str | None] = {"OMP_NUM_THREADS": str(self._source.threads)}
            if peer != "detgen":
                # How long OpenMP's threads spin is detgen's choice for itself; its peers run as they do alone.
                environment["GOMP_SPINCOUNT"] = None
            environment |= dict(variant.environment)
            child = self._children[variant.process] = Child(variant.process, environment, self._logs)
        key = variant.process, peer, variant.name
        if key not in self._loaded:
            child.ask("load", peer, self._source, variant, self._batch_sizes)
            self._loaded.add(key)


def call_once(function: str, arguments: dict[str, Any], threads: int, logs: Path) -> Any:
    """What a function, given by `module:name`, returns in a process of its own.

    Raises:
        PeerError: it failed.
    """
    child = Child(function.rpartition(":")[2], {"OMP_NUM_THREADS": str(threads)}, logs)
    try:
        return child.ask("call", function, arguments)
    finally:
        child.close()
