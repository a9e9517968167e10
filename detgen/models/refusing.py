"""Says in one line why a model cannot run, if its own forward raises an exception."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from detgen.errors import EngineError
from detgen.failing import limit_reached


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Refuse a model if one of its modules raises an exception inside; other exceptions are faults of detgen.

    Args:
        kind: name and class of the model.

    Raises:
        EngineError: names the module, its line and the reason.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raised = raised_in(error)
        if raised is None or limit_reached(error) is not None:
            raise
        name, line = raised
        said = next(iter(str(error).strip().splitlines()), "")
        reason = (
            f"its {name} does not run in detgen's passes, which bring no tensor of a mask, no cache and no padding"
            f" (at `{line}`: {type(error).__name__}: {said})"
        )
        own = isinstance(error, NotImplementedError)  # raised by detgen when it knows the reason
        raise EngineError(f"{kind} is not supported: {said if own and said else reason}") from error


def raised_in(error: BaseException) -> tuple[str, str] | None:
    """Return the class of the model's innermost module behind an error, and its line; None if there is none."""
    torch = sys.modules.get("torch")
    if torch is None:  # then there is no such module
        return None
    found: tuple[FrameType, int, str] | None = None
    at = error.__traceback__
    while at is not None:
        module, place = at.tb_frame.f_locals.get("self"), at.tb_frame.f_globals.get("__name__", "")
        if isinstance(module, torch.nn.Module) and not place.startswith(("torch.", "detgen.")):
            found = at.tb_frame, at.tb_lineno, type(module).__name__
        at = at.tb_next
    if found is None:
        return None
    frame, number, name = found
    return name, linecache.getline(frame.f_code.co_filename, number).strip().rstrip("(")
