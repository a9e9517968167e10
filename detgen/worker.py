"""A process of its own that calls functions and sends back what they return, one after the other.

Libraries cannot disturb each other there, memory has a peak of its own, and a crash is an error instead of the end.
Imports nothing of detgen.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PATIENCE = 5.0  # seconds that a worker has to end by itself
# Detgen's package alone becomes importable there, nothing of what is installed beside it.
_PROGRAM = """
import importlib.util, sys
from multiprocessing.connection import Connection
place = sys.argv[1]
spec = importlib.util.spec_from_file_location("detgen", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["detgen"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from detgen import worker
worker.serve_from(Connection(int(sys.argv[2])))
"""


class WorkerError(Exception):
    """A call that failed in its worker, or a worker that died; the message is one line."""


class Worker:
    """A process that answers one call at a time. A context manager.

    Args:
        name: of the process.
        environment: variables that it is started with; without those that are None.
        log: file for what it prints; None leaves it the streams of this process.
        python: runs it in place of this process's Python, with the packages that are installed there. What is called
            needs nothing of detgen but modules that import the standard library alone.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        python: str | None = None,
    ) -> None:
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        if python is None:
            # No daemon: what it runs may start processes of its own.
            started = context.Process(target=_serve, args=(theirs, environment or {}, log), name=name, daemon=False)
            started.start()
            self._process: Any = started
        else:
            self._process = _Program(python, theirs)
            self._connection.send((environment or {}, log))
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return bool(self._process.is_alive())

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Begin a call; `finish` waits for it. Meanwhile this process goes on.

        Args:
            function: of a module; imported there.
            arguments: that can be pickled.

        Raises:
            WorkerError: the worker has died.
        """
        try:
            self._connection.send((function, arguments))
        except OSError:
            raise WorkerError(self._death()) from None

    def ready(self, seconds: float) -> bool:
        """Whether `finish` would not wait, after waiting for so many seconds at most."""
        return self._connection.poll(max(seconds, 0.0))

    def finish(self) -> Any:
        """Wait for the call that was begun first, and return what it returned.

        Raises:
            WorkerError: it failed, or the worker has died.
        """
        try:
            good, answer = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerError(self._death()) from None
        if not good:
            raise WorkerError(answer)
        return answer

    def call(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Call a function and wait for what it returns; arguments and errors as `begin` and `finish`."""
        self.begin(function, *arguments)
        return self.finish()

    def close(self, patience: float = _PATIENCE) -> None:
        """Hang up; it ends by itself, or is ended after so many seconds."""
        self._connection.close()
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            self._process.join(patience)
            patience = _PATIENCE
            if not self._process.is_alive():
                return

    def _death(self) -> str:
        self._process.join(_PATIENCE)
        where = f" (see {self.log})" if self.log is not None else ""
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                why = ", as the system does when memory runs out" if name == "SIGKILL" else ""
                return f"its process was ended by {name}{why}{where}"
        return f"its process ended with exit status {code}{where}"


class _Program:
    """A worker's process that another Python runs, with the methods of a multiprocessing.Process."""

    def __init__(self, python: str, connection: Connection) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        number = connection.fileno()
        command = [python, "-c", _PROGRAM, str(Path(__file__).parent), str(number)]
        try:
            self._popen = subprocess.Popen(command, env=environment, pass_fds=[number], stdin=subprocess.DEVNULL)
        except OSError as error:
            raise WorkerError(f"cannot run {python}: {error.strerror}") from None
        self.terminate, self.kill = self._popen.terminate, self._popen.kill

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def join(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)


def serve_from(connection: Connection) -> None:
    """The side of a worker that another Python runs; it is told its environment and its log first."""
    environment, log = connection.recv()
    _serve(connection, environment, log)


def _serve(connection: Connection, environment: Mapping[str, str | None], log: Path | None) -> None:
    """The worker's side: calls until the other side hangs up; answers (True, result) or (False, what went wrong)."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            try:
                function, arguments = connection.recv()
                answer = True, function(*arguments)
            except (EOFError, KeyboardInterrupt):
                return
            except BaseException as error:
                sys.stderr.flush()
                answer = False, describe(error)
            connection.send(answer)


def describe(error: BaseException) -> str:
    """One line of what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    kind = type(error).__name__
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        return f"out of memory ({kind})"
    return f"{kind}: {lines[0]}" if lines[0] else kind
