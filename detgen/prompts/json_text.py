"""Parse JSON texts equally strictly in every version of Python."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from detgen.errors import RequestError
from detgen.params import shown

# Half of the depth that Python reads, so that the error for a record does not depend on the depth of the caller.
_DEEPEST = 500
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


class RepeatedKeyError(RequestError):
    """A key is given twice.

    Attributes:
        value: value of the whole text, in which the last value of the key counts.
    """

    value: Any = None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RepeatedKeyError: if a key is given twice.
        RequestError: if it is not valid JSON, or has a value that JSON output could not hold.
    """
    if _too_deep(text):
        raise RequestError("not valid JSON: nested too deeply")
    try:
        try:
            return _DECODER.decode(text)
        except RepeatedKeyError as error:
            error.value = _LENIENT.decode(text)
            raise
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno} of it"
        raise RequestError(f"not valid JSON: {error.msg.removesuffix(' at')} at {place}") from None
    except RepeatedKeyError:
        raise
    except RecursionError:
        raise RequestError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        reason = "a number of too many digits" if "integer string conversion" in str(error) else str(error)
        raise RequestError(f"not valid JSON: {reason}") from None


def _too_deep(text: str) -> bool:
    """Return whether a text is nested so deeply that reading it might fail, depending on the caller's own depth."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return False
    depth = 0
    for part in _BRACKETS.finditer(text):
        if part[0] in ("[", "{"):
            depth += 1
            if depth > _DEEPEST:
                return True
        elif part[0] in ("]", "}"):
            depth -= 1
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"{shown(twice)} is given twice; keep one of them")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)  # the last value of a key counts
