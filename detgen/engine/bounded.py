"""Calls a function of a stranger, such as a model's chat template, within bounds of time, memory and length.

A template can loop for ever, or ask for all of the memory in a single operation, which nothing in its own process could
stop. Hence the call is made in a copy of this process, whose bounds the operating system keeps. The bound of time is
processor time: neither a slow nor a busy machine turns a good template into an error.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 10.0  # of processor time for one call; ordinary templates take thousandths
CHARACTERS = 1 << 26  # of a text; more than any context holds
_MEMORY = 2 << 30  # bytes in addition to those of the process
_PATIENCE = 30  # times the bound of processor time; a busy machine may give a process little of it
_ATTEMPTS = 3  # the copy may just have ended when a call comes
_IDLE = 1.0  # seconds without a call after which the copy ends: as long as it lives, changed memory is held twice
_SIZE = struct.Struct("<q")


class BoundsError(Exception):
    """A call went over a bound, or raised something; the message is one line."""


class Bounded:
    """Calls one function in a copy of this process, which is made when it is needed and kept while calls come in.

    Calls of several threads take turns. What the function changes stays in the copy.

    Args:
        function: returns a text; its arguments can be pickled.
        seconds: of processor time for a call.
    """

    def __init__(self, function: Callable[..., str], seconds: float = SECONDS) -> None:
        self._function, self._seconds = function, seconds
        self._turn = threading.Lock()
        self._child = -1
        self._owner = -1
        self._to, self._from = -1, -1

    def __call__(self, *arguments: Any, **named: Any) -> str:
        """What the function returns.

        Raises:
            BoundsError: it takes too long, too much memory, writes too much, or raises something.
        """
        try:
            call = pickle.dumps((arguments, named))
        except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
            raise BoundsError(str(error)) from None
        with self._turn:
            answer = None
            for _ in range(_ATTEMPTS):
                answer = answer or self._asked(call)
        good, text = answer or (False, "it broke down")
        if not good:
            raise BoundsError(text)
        return text

    def _asked(self, call: bytes) -> tuple[bool, str] | None:
        """The copy's answer; None if it had ended before the call reached it."""
        if self._child < 0 or self._owner != os.getpid():
            self._start()
        try:
            _send(self._to, call)
            if not select.select([self._from], [], [], _PATIENCE * self._seconds)[0]:
                os.kill(self._child, signal.SIGPROF)  # as if it had used up its time: it is stuck without using any
            received = _receive(self._from)
        except OSError:
            received = None
        except BaseException:  # an interruption: an answer that comes later would be taken for that of the next call
            os.kill(self._child, signal.SIGKILL)
            self._end()
            raise
        if received is not None:
            good, text = received[:1] == b"+", received[1:].decode("utf-8", "surrogatepass")
            return good, text
        code = os.waitstatus_to_exitcode(self._end())
        if code == 0:
            return None
        killed = code in (-signal.SIGPROF, -signal.SIGKILL)
        return False, self._too_much() if killed else f"it broke down ({code})"

    def _too_much(self) -> str:
        # One text for both bounds: which of the two is met first may depend on the machine.
        return f"it takes more than {self._seconds:g} seconds or {_MEMORY >> 30} GiB of memory"

    def _start(self) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # Otherwise the tokenizers library says on standard error that it saw a copy being made.
        former = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self._owner = os.getpid()
        self._child = os.fork()
        if not self._child:
            self._serve(theirs, ours)
        if former is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        os.close(theirs)
        os.close(ours)

    def _end(self) -> int:
        """Let the copy go; its wait status."""
        os.close(self._to)
        os.close(self._from)
        child, self._child = self._child, -1
        with suppress(ChildProcessError):
            return os.waitpid(child, 0)[1]
        return 0

    def __del__(self) -> None:
        if self._child > 0 and self._owner == os.getpid():
            self._end()

    def _serve(self, calls: int, answers: int) -> NoReturn:
        """The copy's life."""
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # the other side ends it, by hanging up
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            _keep_open({calls, answers})
            _limit_memory()
            while select.select([calls], [], [], _IDLE)[0]:
                call = _receive(calls)
                if call is None:
                    break
                signal.setitimer(signal.ITIMER_PROF, self._seconds)
                answer = self._answer(*pickle.loads(call))
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(answers, answer)
            code = 0
        finally:
            os._exit(code)

    def _answer(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
        try:
            text = self._function(*arguments, **named)
            if len(text) > CHARACTERS:
                return f"-it writes more than {CHARACTERS:,} characters".encode()
            return b"+" + text.encode("utf-8", "surrogatepass")
        except MemoryError:
            return f"-{self._too_much()}".encode()
        except BaseException as error:
            return f"-{error}".encode("utf-8", "surrogatepass")


def _limit_memory() -> None:
    """Give this process no more memory than it has and `_MEMORY`."""
    try:
        size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:  # elsewhere than on Linux
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = size + _MEMORY if hard == resource.RLIM_INFINITY else min(size + _MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _keep_open(files: set[int]) -> None:
    """Close all files but these and the standard streams: a lock must not outlive the process that took it."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in files:
            with suppress(OSError):
                os.close(int(name))


def _send(file: int, message: bytes) -> None:
    view = memoryview(_SIZE.pack(len(message)) + message)
    while view:
        view = view[os.write(file, view) :]


def _receive(file: int) -> bytes | None:
    """The next message; None if the other side has hung up."""
    head = _read(file, _SIZE.size)
    return None if head is None else _read(file, _SIZE.unpack(head)[0])


def _read(file: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(file, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
