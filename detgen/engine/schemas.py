"""JSON schemas as llguidance is given them, so that what fits its reading of one fits the schema.

It counts in doubles, and of an object whose keys may have any name it can write one key twice.
"""

from __future__ import annotations

import json
from typing import Any

from detgen.errors import RequestError

_MOST = 1 << 53  # whole numbers beyond are not all of them doubles
_VALUES = ("enum", "const")  # have values, and no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # have schemas by any names
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}


def exact(text: str) -> str:
    """The text of a schema, with bounds drawn in to where doubles are exact.

    Raises:
        RequestError: that would not do, or it asks for what llguidance would not keep; says what and why.
    """
    try:
        schema = json.loads(text)
        waiting, changed = [schema] if isinstance(schema, dict | list) else [], False
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict):
                changed |= _draw_in(node)
                _check_count(node)
            parts = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in parts:
                if key in _VALUES:
                    _check_numbers(value)
                elif key in _BY_NAME and isinstance(value, dict):
                    waiting += [one for one in value.values() if isinstance(one, dict)]
                elif isinstance(value, dict | list):
                    waiting.append(value)
        return json.dumps(schema) if changed else text
    except RecursionError:
        raise RequestError("it is nested too deeply") from None


def _draw_in(node: dict[str, Any]) -> bool:
    """Change bounds that no double is exact at; whether there were any, or a keyword that asks for nothing."""
    asked_nothing = node.get("uniqueItems") is False
    if asked_nothing:
        del node["uniqueItems"]
    far = {name: value for name in _BOUNDS if isinstance(value := node.get(name), int | float) and abs(value) > _MOST}
    for name, value in far.items():
        if (value > 0) != (_BOUNDS[name] > 0):
            raise RequestError(f"{name} {value} is beyond 2^53, where numbers are not exact")
        node[name] = _BOUNDS[name] * _MOST
    return asked_nothing or bool(far)


def _check_count(node: dict[str, Any]) -> None:
    least, required = node.get("minProperties"), node.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    open_ = node.get("additionalProperties") is not False or node.get("patternProperties")
    if isinstance(least, int | float) and least > known and open_:
        raise RequestError(
            "minProperties counts keys of any name, one of which may be written twice; list enough of them in required,"
            " or set additionalProperties to false"
        )


def _check_numbers(value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and abs(one) > _MOST:
            raise RequestError(f"the number {one} is beyond 2^53, where numbers are not exact; make it a string")
