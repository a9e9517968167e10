"""Adapts JSON schemas for llguidance, so that whatever fits its reading of a schema fits the schema itself.

llguidance counts in doubles, may write a key twice if an object's keys may have any name, leaves out control characters
of constants and expressions, and has a February 29 in every year.
"""

from __future__ import annotations

import json
import re
from typing import Any

from detgen.errors import RequestError

_MOST = 1 << 53  # above it, not all whole numbers are doubles
_VALUES = ("enum", "const")  # contain values, not schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # contain schemas by name
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
# Beginnings of dates: any day of other months, the first 28 of February, and its 29th in leap years.
_DAYS = (
    "^(?:.{5}(?:0[13-9]|1[0-2])|.{8}(?:[01]|2[0-8])"
    "|(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
# Characters that JSON can only write by their numbers, and their spellings in an expression.
_CONTROL = r"[\0-\x07\x0b\x0e-\x1f\x7f]"
_HEX = "(?:0[0-7bBe-fE-F]|1[0-9a-fA-F]|7[fF])"
_SPELLED = rf"(?:{_CONTROL}|\\(?:[av]|(?:x|u00|U000000){_HEX}|[xuU]\{{0*(?:{_HEX}|[0-7bBe-fE-F])\}}))"
# An expression, part by part; a class of only these characters has no member that could be written.
_PARTS = re.compile(rf"(?P<control>{_SPELLED}|\[(?:{_SPELLED}-?)+\])|\[\^?\]?(?:\\.|[^][\\])*\]|\\.|.", re.DOTALL)


def exact(text: str) -> str:
    """Return a schema's text with bounds clamped to exact doubles, and dates limited to those that exist.

    Raises:
        RequestError: if that is impossible, or the schema asks for something that llguidance would not keep.
    """
    try:
        schema = json.loads(text)
        waiting, changed = [schema] if isinstance(schema, dict | list) else [], False
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict):
                changed |= _draw_in(node) | _keep_calendar(node)
                _check_count(node)
                _check_patterns(node)
            parts = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in parts:
                if key in _VALUES:
                    _check_values(value)
                elif key in _BY_NAME and isinstance(value, dict):
                    waiting += [one for one in value.values() if isinstance(one, dict)]
                elif isinstance(value, dict | list):
                    waiting.append(value)
        return json.dumps(schema) if changed else text
    except RecursionError:
        raise RequestError("it is nested too deeply") from None


def _draw_in(node: dict[str, Any]) -> bool:
    """Clamp bounds beyond exact doubles; return whether anything changed, including keywords without effect."""
    asked_nothing = node.get("uniqueItems") is False
    if asked_nothing:
        del node["uniqueItems"]
    far = {name: value for name in _BOUNDS if isinstance(value := node.get(name), int | float) and abs(value) > _MOST}
    for name, value in far.items():
        if (value > 0) != (_BOUNDS[name] > 0):
            raise RequestError(f"{name} {value} is beyond 2^53, where numbers are not exact")
        node[name] = _BOUNDS[name] * _MOST
    return asked_nothing or bool(far)


def _keep_calendar(node: dict[str, Any]) -> bool:
    """Rule out dates that do not exist; return whether anything changed."""
    also = node.get("allOf", [])
    if node.get("format") not in ("date", "date-time") or not isinstance(also, list):
        return False
    node["allOf"] = [*also, {"pattern": _DAYS}]
    return True


def _check_count(node: dict[str, Any]) -> None:
    least, required = node.get("minProperties"), node.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    open_ = node.get("additionalProperties") is not False or node.get("patternProperties")
    if isinstance(least, int | float) and least > known and open_:
        raise RequestError(
            "minProperties counts keys of any name, one of which may be written twice; list enough of them in required,"
            " or set additionalProperties to false"
        )


def _check_patterns(node: dict[str, Any]) -> None:
    by_name = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(by_name if isinstance(by_name, dict) else ())):
        if isinstance(pattern, str) and any(part["control"] for part in _PARTS.finditer(pattern)):
            raise RequestError(f"the pattern {pattern!a:.80} asks for a control character, which cannot be written")


def _check_values(value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and abs(one) > _MOST:
            raise RequestError(f"the number {one} is beyond 2^53, where numbers are not exact; make it a string")
        elif isinstance(one, str) and re.search(_CONTROL, one):
            raise RequestError(f"the string {one!a:.80} has a control character, which cannot be written")
