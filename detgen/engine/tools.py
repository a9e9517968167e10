"""The tools of a chat, and which of them its `tool_choice` requires. Imports nothing that is slow to load."""

from __future__ import annotations

import json
from typing import Any

from detgen.errors import RequestError
from detgen.params import shown

_NEEDED = 'auto, none, required or {"type": "function", "function": {"name": "..."}}'


def called(choice: Any, names: list[str]) -> list[str]:
    """Return the tools one of which a text must call.

    Args:
        choice: `tool_choice`, as in the OpenAI API.
        names: names of the tools.

    Raises:
        RequestError: if it is invalid, there are no tools, or it names an unknown one.
    """
    if choice in (None, "auto", "none"):
        return []
    name = None
    if isinstance(choice, dict):
        check_type("tool_choice", choice)
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(f"tool_choice must be {_NEEDED}, got {json.dumps(choice)[:80]}")
    if not names:
        raise RequestError("tool_choice needs tools that are functions with a name")
    if name is not None and name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is not among tools: {', '.join(names)}")
    return names if name is None else [name]


def functions(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the functions among the tools of a chat, by name.

    Raises:
        RequestError: if two have the same name, or one is not a function.
    """
    made: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        check_type(f"tools[{i}]", tool)
        each = tool.get("function", tool)
        if isinstance(each, dict) and isinstance(name := each.get("name"), str) and name:
            if name in made:
                raise RequestError(f"tools has two functions called {name}; give each a name of its own")
            made[name] = each
    return made


def check_type(place: str, given: dict[str, Any]) -> None:
    """Refuse a tool, a call or a choice that is not of a function.

    Args:
        place: its name in errors.
        given: the object, which may have a type.

    Raises:
        RequestError: if it has another type; the message names it.
    """
    kind = given.get("type")
    if kind not in (None, "function"):
        raise RequestError(f"{place} has the type {shown(kind)}, which is not supported; only functions are tools here")
