"""How the process ends on an error that no command expects: a limit of the system, or a fault of detgen.

Imports nothing of detgen and few other modules, since files and memory may have run out.
"""

from __future__ import annotations

import errno
import os
import resource
import shlex
import sys
import traceback

LIMITED, CRASHED = 2, 70  # exit statuses; 70 is EX_SOFTWARE of sysexits.h

DEBUG = "DETGEN_DEBUG"  # environment variable that turns tracebacks on

# Messages of libraries that get no memory; few of them raise MemoryError.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "unable to mmap",
    "bad_alloc",
    "bad allocation",
    "out of memory",
    "unable to allocate",
)
# Messages of oneDNN, and of Python when an extension sets no exception. Both also occur for other reasons, so they
# count only where a limit is set.
_NO_MEMORY_UNDER_LIMIT = (
    "could not create a primitive",
    "could not create a memory",
    "error return without exception set",
)
_NO_THREAD = ("can't start new thread", "thread creation failed")
_MOST_CAUSES = 16


def limit_reached(error: BaseException) -> str | None:
    """Return one line with the system limit that caused an error, its value and a remedy; None if no limit did."""
    seen: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if seen is None:
            return None
        if (found := _limit(seen)) is not None:
            return found
        seen = seen.__cause__ or seen.__context__
    return None


def _limit(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower()
    if number == errno.EMFILE:
        return (
            f"too many open files: this process may have {_value(resource.RLIMIT_NOFILE)}; raise that: ulimit -n 1024"
        )
    if number == errno.ENFILE:
        return "too many open files in the whole system; close some programs"
    if number == errno.EFBIG:
        return f"a file may have {_size(resource.RLIMIT_FSIZE)}; raise that: ulimit -f unlimited"
    if any(words in text for words in _NO_THREAD):
        most = f"the user may have {_value(resource.RLIMIT_NPROC)} (ulimit -u)"
        return f"no more threads: {most}, the process {_size(resource.RLIMIT_AS)} of memory (ulimit -v); raise them"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(words in text for words in _NO_MEMORY):
        return _no_memory(text)
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if limited and any(words in text for words in _NO_MEMORY_UNDER_LIMIT):
        return _no_memory(text)
    return None


def _no_memory(text: str) -> str:
    less = "ask for less with --kv-memory, --batch-size or a smaller model"
    if "cuda" in text:
        return f"the GPU's memory is used up; {less}"
    for name, kind in (("v", resource.RLIMIT_AS), ("d", resource.RLIMIT_DATA)):
        if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY:
            limit = f"this process may have {_size(kind)} of it"
            return f"memory is used up: {limit}; raise that: ulimit -{name} unlimited; or {less}"
    return f"the machine's memory is used up; {less}"


def _value(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    return "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _size(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    return "any amount" if soft == resource.RLIM_INFINITY else f"{soft / (1 << 20):,.0f} MiB"


def end(error: Exception) -> int:
    """Print one line on standard error about what ended the process, and return the exit status.

    The error's notes become part of the line. If `DETGEN_DEBUG` is set, the traceback comes before it.
    """
    notes = getattr(error, "__notes__", [])
    limit = limit_reached(error)
    if limit is not None:
        words, status = [limit, *notes], LIMITED
    else:
        remedy = f"to see the traceback: {shlex.join(['detgen', '--debug', *sys.argv[1:]])}"
        words, status = [f"internal error: {_described(error)}", *(notes or [remedy])], CRASHED
    try:
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        print(f"detgen: error: {'; '.join(words)}", file=sys.stderr, flush=True)  # noqa: T201 (rich may be the fault)
    except (OSError, ValueError, AttributeError):
        pass  # the stream is closed; the exit status is all that can be reported
    return status


def _described(error: Exception) -> str:
    """Return the error's type and the first line of its message, with control characters escaped."""
    first = next(iter(str(error).strip().splitlines()), "")
    kind = type(error).__name__
    text = f"{kind}: {first}" if first else kind
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
