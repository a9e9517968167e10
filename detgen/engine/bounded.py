"""Calls an untrusted function, such as a model's chat template, with limits on time, memory and length.

A template or a tokenizer can run forever or ask for all memory in a single operation, which nothing in its own process
could stop. So the call is made in a forked copy of this process, whose limits the operating system enforces. The time
limit is processor time, so that neither a slow nor a busy machine turns a good template into an error.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from detgen.errors import EngineError
from detgen.interruption import ENDING

SECONDS = 10.0  # of processor time for one call; ordinary templates take thousandths
CHARACTERS = 1 << 26  # of a text; more than any context holds
_MEMORY = 2 << 30  # bytes in addition to those of the process
_PATIENCE = 30  # times the bound of processor time; a busy machine may give a process little of it
_ATTEMPTS = 3  # the copy may just have ended when a call comes
_IDLE = 1.0  # seconds without a call until the copy ends: while it lives, changed memory is held twice
_SIZE = struct.Struct("<q")
_GOOD, _FAILED, _TOO_MUCH = b"+", b"-", b"!"  # how an answer begins

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Result = TypeVar("_Result")


class BoundsError(Exception):
    """A call exceeded a limit or raised an exception; the message is one line."""


class _TooMuchError(BoundsError):
    """A call took too much time or memory."""


class Bounded(Generic[_Result]):
    """Calls one function in a copy of this process, which is made when needed and kept while calls come in.

    Calls from several threads take turns. What the function changes stays in the copy.

    Args:
        function: a function whose arguments and results can be pickled.
        seconds: processor time for a call.
        least: gives the smallest call of the same kind. If a call exceeds a limit and the smallest one does, too, no
            more calls of this kind are tried.
    """

    def __init__(
        self,
        function: Callable[..., _Result],
        seconds: float = SECONDS,
        least: Callable[..., _Call] | None = None,
    ) -> None:
        self._function, self._least, self._seconds = function, least, seconds
        self._given_up: set[bytes] = set()  # least calls
        self._turn = threading.Lock()
        self._child = -1
        self._owner = -1
        self._to, self._from = -1, -1

    def __call__(self, *arguments: Any, **named: Any) -> _Result:
        """Call the function and return its result.

        Raises:
            BoundsError: if it takes too much time or memory, writes too much, or raises an exception.
            EngineError: if there is not enough memory for a copy of this process.
        """
        try:
            call = pickle.dumps((arguments, named))
            least = None if self._least is None else pickle.dumps(self._least(*arguments, **named))
        except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
            raise BoundsError(str(error)) from None
        with self._turn:
            if least in self._given_up:
                raise _TooMuchError(self._too_much())
            try:
                return self._result(call)
            except _TooMuchError:
                if least is not None and self._takes_too_much(least):
                    self._given_up.add(least)
                raise

    def _takes_too_much(self, call: bytes) -> bool:
        try:
            self._result(call)
        except BoundsError as error:
            return isinstance(error, _TooMuchError)
        return False

    def _result(self, call: bytes) -> _Result:
        answer = None
        for _ in range(_ATTEMPTS):
            answer = answer or self._asked(call)
        kind, content = (answer[:1], answer[1:]) if answer else (_FAILED, b"it broke down")
        if kind == _GOOD:
            found: _Result = pickle.loads(content)
            return found
        if kind == _TOO_MUCH:
            raise _TooMuchError(self._too_much())
        raise BoundsError(content.decode("utf-8", "surrogatepass"))

    def _asked(self, call: bytes) -> bytes | None:
        """Return the copy's answer; None if the copy had ended before the call reached it."""
        if self._child < 0 or self._owner != os.getpid():
            self._start()
        try:
            _send(self._to, call)
            if not select.select([self._from], [], [], _PATIENCE * self._seconds)[0]:
                os.kill(self._child, signal.SIGPROF)  # as if its time were used up: it is stuck without using any
            received = _receive(self._from)
        except OSError:
            received = None
        except BaseException:  # an interruption: a late answer would be taken for that of the next call
            os.kill(self._child, signal.SIGKILL)
            self._end()
            raise
        if received is not None:
            return received
        code = os.waitstatus_to_exitcode(self._end())
        if code == 0:
            return None
        killed = code in (-signal.SIGPROF, -signal.SIGKILL, -signal.SIGABRT)  # libraries abort without memory
        return _TOO_MUCH if killed else _FAILED + f"it broke down ({f'signal {-code}' if code < 0 else code})".encode()

    def _too_much(self) -> str:
        # The same text for both bounds, since it may depend on the machine which is met first.
        return f"it takes more than {self._seconds:g} seconds or {_MEMORY >> 30} GiB of memory"

    def _start(self) -> None:
        files: list[int] = []
        # Otherwise the tokenizers library warns on standard error that the process was forked.
        former = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            files += os.pipe()
            files += os.pipe()
            child = os.fork()
        except OSError as error:  # an error of the machine, not of a prompt
            for file in files:
                os.close(file)
            raise EngineError(f"cannot start another process: {error.strerror}; free some memory") from None
        finally:
            if former is None:
                del os.environ["TOKENIZERS_PARALLELISM"]
        theirs, self._to, self._from, ours = files
        if not child:
            self._serve(theirs, ours)
        self._child, self._owner = child, os.getpid()
        # Not in `__del__`, which may run after modules are gone.
        self._finalize = weakref.finalize(self, _end, child, self._owner, self._to, self._from)
        os.close(theirs)
        os.close(ours)

    def _end(self) -> int:
        """End the copy and return its wait status."""
        self._child = -1
        return self._finalize() or 0

    def _serve(self, calls: int, answers: int) -> NoReturn:
        """Answer calls, in the copy."""
        code = 1
        try:
            for number in ENDING:  # the other side ends this one by hanging up
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print there what they then raise
            _keep_open({calls, answers})
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _limit_memory()
            sound = True
            while sound and select.select([calls], [], [], _IDLE)[0]:
                call = _receive(calls)
                if call is None:
                    break
                signal.setitimer(signal.ITIMER_PROF, self._seconds)
                answer, sound = self._answer(*pickle.loads(call))
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(answers, answer)
            code = 0
        finally:
            os._exit(code)

    def _answer(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[bytes, bool]:
        """Return the answer, and whether another call can follow, which it cannot after a library has panicked."""
        try:
            result = self._function(*arguments, **named)
            if isinstance(result, str) and len(result) > CHARACTERS:
                return _FAILED + f"it writes more than {CHARACTERS:,} characters".encode(), True
            return _GOOD + pickle.dumps(result), True
        except MemoryError:
            return _TOO_MUCH, False
        except BaseException as error:
            return _FAILED + str(error).encode("utf-8", "surrogatepass"), isinstance(error, Exception)


def _end(child: int, owner: int, *files: int) -> int:
    """End a copy and return its wait status."""
    if owner != os.getpid():
        return 0
    for file in files:
        os.close(file)
    with suppress(ChildProcessError):
        return os.waitpid(child, 0)[1]
    return 0


def _limit_memory() -> None:
    """Limit this process to the memory that it has plus `_MEMORY`."""
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
    """Return the next message; None if the other side has hung up."""
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
