"""Splits the answer of a chat model into its reasoning, its content and its tool calls.

The marks in the model's own chat template decide; those of the families of most models are known. Whatever is
incomplete or not JSON stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, NoReturn

_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_CALL, _CALLED = "<tool_call>", "</tool_call>"  # Hermes, Qwen
_PYTHON = "<|python_tag|>"  # Llama 3
_CALLS, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"  # Mistral
NAME = r"[\w.-]+"  # name of a tool that precedes its arguments
_NAMED = re.compile(rf"\s*({NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
# A mark that is a special token is missing from decoded text unless it is asked for.
MARKS = frozenset({*(mark for pair in _THOUGHTS for mark in pair), _CALL, _CALLED, _PYTHON, _CALLS, _ARGUMENTS})
MARKS |= {"[CALL_ID]"}


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the function.
        arguments: a JSON object, as the model wrote it.
        error: what is wrong with the call; None if no fault was found.
    """

    name: str
    arguments: str
    error: str | None = None


class Answer(NamedTuple):
    """The parts of an answer.

    Attributes:
        reasoning_content: the model's reasoning before the answer; None if there is none.
        content: the answer without marks; None if it is empty.
        tool_calls: the calls, in order.
    """

    reasoning_content: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]


def take_apart(
    template: str, text: str, *, opened: bool = False, closed: bool = False, tools: Collection[str] = (), calls: bool
) -> Answer | None:
    """Split a text that a chat model wrote; None if it has none of the template's marks.

    Args:
        template: the chat template.
        text: the text, including special tokens that are marks.
        opened: whether the prompt ends inside a thought; see `thinks`.
        closed: whether a text that never ends this thought counts as content.
        tools: names of the tools that may be called. A call without a mark must name one of these.
        calls: whether to look for calls.
    """
    thought, rest = _thought(template, text, opened, closed)
    content, found = _calls(template, rest, tools) if calls else (rest, [])
    if thought is None and not found:
        return None
    content = content.strip() if found else content.lstrip()
    return Answer(thought, content or None, tuple(found))


def spelling_of(template: str) -> tuple[tuple[str, str] | None, str | None]:
    """Return the marks around a template's thoughts, and the mark of its calls; None for either if it has none."""
    think = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    listed = _ARGUMENTS if _ARGUMENTS in template else _CALLS
    if _CALL in template:
        return think, _CALL
    if _CALLS in template:
        return think, listed
    bare = _PYTHON in template or re.search(r'"name": function name,\s*"parameters"', template)
    return think, _PYTHON if bare else None


def thinks(template: str, prompt: str) -> bool:
    """Return whether a prompt, or its last part, ends with the mark after which the model thinks."""
    return any(end in template and prompt.rstrip().endswith(begin) for begin, end in _THOUGHTS)


def goes_on_thinking(template: str, message: str) -> bool:
    """Return whether a message that the model continues ends inside a thought."""
    return any(end in template and message.rfind(begin) > message.rfind(end) for begin, end in _THOUGHTS)


def tool_call(name: object, arguments: object) -> ToolCall | None:
    """Return a call; None if these do not make one.

    Args:
        name: of the function.
        arguments: an object, or a string with its JSON, which is kept as it is.
    """
    try:
        given = _DECODER.decode(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not name or not isinstance(given, dict):
            return None
        if not isinstance(arguments, str):
            arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        return ToolCall(name, arguments)
    except (ValueError, RecursionError):
        return None


def _thought(template: str, text: str, opened: bool, closed: bool) -> tuple[str | None, str]:
    """Return the model's reasoning, None if there is none, and the text after it."""
    for begin, end in _THOUGHTS:
        if end not in template:
            continue
        began = text.lstrip().startswith(begin)
        if not began and not opened:
            continue
        thought, mark, rest = (text.lstrip()[len(begin) :] if began else text).partition(end)
        if mark or not closed:
            return thought.strip(), rest
    return None, text


def _calls(template: str, text: str, tools: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Return a text without its calls, and the calls."""
    if _CALL in template:
        return _marked(text)
    if _CALLS in template:
        before, mark, rest = text.partition(_CALLS)
        found = [_mistral(part) for part in rest.split(_CALLS)] if mark else []
    elif _PYTHON in template or '"parameters"' in template:
        before, mark, rest = text.partition(_PYTHON)
        found = [_sequence(rest if mark else text)]
        if not mark:
            before = ""
            found = [of if of and all(call.name in tools for call in of) else None for of in found]
    else:
        return text, []
    whole = [call for of in found if of for call in of]
    return (before, whole) if whole and all(found) else (text, [])


def _marked(text: str) -> tuple[str, list[ToolCall]]:
    """Extract calls between marks. Anything else stays in the text; the last mark may be missing."""
    rest, found, at = [], list[ToolCall](), 0
    while (start := text.find(_CALL, at)) >= 0:
        inner = start + len(_CALL)
        calls, end = _each(text, inner)
        ended = text.startswith(_CALLED, end)
        if calls is None or not (ended or end == len(text)):
            rest.append(text[at:inner])
            at = inner
        else:
            rest.append(text[at:start])
            found += calls
            at = end + len(_CALLED) * ended
    return "".join([*rest, text[at:]]), found


def _mistral(text: str) -> list[ToolCall] | None:
    """Return the calls after Mistral's mark: a list, or a single call with its name before its arguments."""
    if (match := _NAMED.match(text)) is not None:
        value, end = _json(text, match.end())
        call = tool_call(match[1], text[match.end() : end].rstrip()) if isinstance(value, dict) else None
        calls = None if call is None else [call]
    else:
        calls, end = _each(text, 0)
    return calls if end == len(text) else None


def _sequence(text: str) -> list[ToolCall] | None:
    """Return the calls of a text that consists of calls separated by semicolons."""
    found, at = list[ToolCall](), 0
    while at < len(text):
        calls, at = _each(text, at)
        if calls is None:
            return None
        found += calls
        at = _skip(text, at + text.startswith(";", at))
    return found or None


def _each(text: str, at: int) -> tuple[list[ToolCall] | None, int]:
    """Return the calls in the object or list at a position, None if one is not a call, and the position after it."""
    value, end = _json(text, at)
    at = _skip(text, at)
    starts = [start for _, start, _ in _values(text, at)] if isinstance(value, list) else [at]
    found = []
    for start, one in zip(starts, value if isinstance(value, list) else [value], strict=True):
        call = _written(text, start) if isinstance(one, dict) else None
        if call is None:
            return None, end
        found.append(call)
    return found or None, end


def _written(text: str, at: int) -> ToolCall | None:
    """Return the object at a position as a call, its arguments as they are written; None if it is not a call."""
    found = {key: text[start:end] for key, start, end in _values(text, at)}
    arguments = found.get("arguments", found.get("parameters"))
    if "name" not in found or arguments is None:
        return None
    return tool_call(_DECODER.decode(found["name"]), _DECODER.decode(arguments) if arguments[0] == '"' else arguments)


def _values(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield key, start and end of each value of the JSON object or list at a position; list keys are empty."""
    ends = "}" if text[at] == "{" else "]"
    at = _skip(text, at + 1)
    while text[at] != ends:
        key = ""
        if ends == "}":
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, at)
        yield key, at, end
        at = _skip(text, end)
        at = _skip(text, at + text.startswith(",", at))


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and the position after it and white space; None if there is none."""
    at = _skip(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return value, _skip(text, end)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
