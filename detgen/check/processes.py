"""A second process with the same models: for generations in a fresh process, and for runs that die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.errors import EngineError


class CompanionError(RuntimeError):
    """What went wrong in the other process."""


class _Stopped(BaseException):
    """Ends a run as a kill does: nothing is concluded, and whatever was not written is lost."""


class Companion:
    """Another process, started on first use.

    Args:
        config: how it builds its engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: Any = None
        self._connection: Connection | None = None
        self._quant = ""

    def start(self) -> None:
        """Start it, so that it loads while others work."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._config), daemon=True)
            self._process.start()
            theirs.close()

    def prepare(self, quant: str) -> None:
        """Have it load the model in this quantization, if it runs, while others work."""
        if self._connection is not None and quant != self._quant:
            self._quant = quant
            self._connection.send(("prepare", (quant,)))

    def call(self, work: str, *arguments: Any) -> Any:
        """Have it do `work` (a method of `Subject`, or "start_run") and wait for the result.

        Raises:
            CompanionError: if that fails there, or the process dies unasked.
        """
        self.start()
        assert self._connection is not None
        try:
            self._connection.send((work, arguments))
            good, result = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise CompanionError("the second process ended unexpectedly") from error
        if not good:
            raise CompanionError(result)
        return result

    def call_and_die(self, *arguments: Any) -> None:
        """Have it start a run and be killed in the middle of it, by SIGKILL."""
        self.start()
        assert self._connection is not None
        self._connection.send(("killed_run", arguments))
        try:
            good, result = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            return
        raise CompanionError(result if not good else "the run ended before it could be killed")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._connection is not None
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = self._connection = None
            self._quant = ""


def _serve(connection: Connection, config: EngineConfig) -> None:
    """The other process: does one piece of work after the other until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    from detgen.check.running import Subject

    subject = Subject(config)
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        try:
            if work == "prepare":
                with contextlib.suppress(EngineError):  # the work itself will say so
                    subject.engine(*arguments)
                continue
            if work == "generate":
                connection.send((True, subject.generate(*arguments)))
            else:
                _begin(subject, *arguments, killed=work == "killed_run")
                connection.send((True, None))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


def _begin(subject: Any, task: Any, folder: Path, *, killed: bool) -> None:
    def die() -> None:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise _Stopped

    try:
        subject.start_run(task, folder, die)
    except _Stopped:
        return
