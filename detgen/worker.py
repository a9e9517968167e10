"""A separate process that calls functions one after another and sends back what they return.

Libraries in different processes cannot disturb each other, each process has its own peak of memory, and a crash becomes
an error instead of ending the program. Imports nothing of detgen.
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
# Only detgen's package becomes importable there, not the packages installed next to it.
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
        name: the name of the process.
        environment: changes to its environment variables; None removes a variable.
        log: the file that its output is appended to; None for the streams of this process.
        python: the Python that runs it, with the packages installed there; None for this process's Python. With another
            Python, functions may use only those modules of detgen that import nothing but the standard library.
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
            # Not a daemon: the functions may start processes of their own.
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
        """Whether the process is running and can be called."""
        return bool(self._process.is_alive())

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Begin a call without waiting for it; `finish` does that.

        Args:
            function: a function of a module, which the worker imports.
            arguments: its arguments, which must be picklable.

        Raises:
            WorkerError: if the worker has died.
        """
        try:
            self._connection.send((function, arguments))
        except OSError:
            raise WorkerError(self._death()) from None

    def ready(self, seconds: float) -> bool:
        """Wait at most so many seconds; return whether `finish` can return at once."""
        return self._connection.poll(max(seconds, 0.0))

    def finish(self) -> Any:
        """Wait for the oldest unfinished call, and return its result.

        Raises:
            WorkerError: if the call failed or the worker has died.
        """
        try:
            good, answer = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerError(self._death()) from None
        if not good:
            raise WorkerError(answer)
        return answer

    def call(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Call a function and return its result; arguments and errors as for `begin` and `finish`."""
        self.begin(function, *arguments)
        return self.finish()

    def close(self, patience: float = _PATIENCE) -> None:
        """Close the connection, so that the worker ends; if it has not after so many seconds, terminate or kill it."""
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
    """A worker's process that another Python runs, with the methods of multiprocessing.Process that `Worker` uses."""

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
    """Serve calls in a worker that another Python runs; receives its environment and its log first."""
    environment, log = connection.recv()
    _serve(connection, environment, log)


def _serve(connection: Connection, environment: Mapping[str, str | None], log: Path | None) -> None:
    """Serve calls until the other side closes the connection; answers are (True, result) or (False, the error)."""
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
    """Describe an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    kind = type(error).__name__
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        return f"out of memory ({kind})"
    return f"{kind}: {lines[0]}" if lines[0] else kind
