"""What the values of a record may be: their kinds in words, their depth, and text that can be read."""

from __future__ import annotations

from detgen.errors import RequestError

# Far below the depth at which Python's JSON encoder fails, far above that of real metadata.
_DEEPEST = 100

LONGEST = 64 << 20  # bytes of a line, characters of an element or of a row; no context holds as many
TOO_LONG = "longer than 64 MiB, the most that is read; shorten the prompt, or divide it"

_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), type(value).__name__)


def check_depth(name: str, value: object) -> None:
    """Refuse what is nested too deeply to be written.

    Raises:
        RequestError: naming the limit.
    """
    if _too_deep(value, _DEEPEST):
        raise RequestError(f"{name and name + ' is '}nested more than {_DEEPEST} deep")


def _too_deep(value: object, left: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    if left == 0:
        return True
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list) and _too_deep(part, left - 1):
            return True
    return False
