"""What a chat model answers, taken apart: what it thought, what it says, and the tools that it calls.

By the marks that the model's own chat template has, of the families that most models belong to. What is not whole or
no JSON stays content.
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
NAME = r"[\w.-]+"  # of a tool, where it stands before the arguments
_NAMED = re.compile(rf"\s*({NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
# A mark that is a special token is not in a decoded text unless it is asked for.
MARKS = frozenset({*(mark for pair in _THOUGHTS for mark in pair), _CALL, _CALLED, _PYTHON, _CALLS, _ARGUMENTS})
MARKS |= {"[CALL_ID]"}


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the function.
        arguments: a JSON object, as the model wrote it.
        error: what is wrong with the call; None if nothing is known to be.
    """

    name: str
    arguments: str
    error: str | None = None


class Answer(NamedTuple):
    """The parts of an answer.

    Attributes:
        reasoning_content: what the model thought before it answered; None if it did not.
        content: what it says, without marks; None if that is nothing.
        tool_calls: the calls, in order.
    """

    reasoning_content: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]


def take_apart(
    template: str, text: str, *, opened: bool = False, closed: bool = False, tools: Collection[str] = (), calls: bool
) -> Answer | None:
    """The parts of a text that a chat model wrote; None if it has no marks that the template has, too.

    Args:
        template: the chat template.
        text: with those special tokens that are marks.
        opened: whether the prompt ends inside a thought; see `thinks`.
        closed: whether a text that never ends that thought is no thought.
        tools: the names of what may be called. A call without a mark is one of these.
        calls: whether to look for calls.
    """
    thought, rest = _thought(template, text, opened, closed)
    content, found = _calls(template, rest, tools) if calls else (rest, [])
    if thought is None and not found:
        return None
    content = content.strip() if found else content.lstrip()
    return Answer(thought, content or None, tuple(found))


def spelling_of(template: str) -> tuple[tuple[str, str] | None, str | None]:
    """The marks around a template's thoughts, and the one that tells how it spells calls; None where it has none."""
    think = next((pair for pair in _THOUGHTS if pair[1] in template), None)
    listed = _ARGUMENTS if _ARGUMENTS in template else _CALLS
    if _CALL in template:
        return think, _CALL
    if _CALLS in template:
        return think, listed
    bare = _PYTHON in template or re.search(r'"name": function name,\s*"parameters"', template)
    return think, _PYTHON if bare else None


def thinks(template: str, prompt: str) -> bool:
    """Whether a prompt, or the end of one, ends with the mark after which the model thinks."""
    return any(end in template and prompt.rstrip().endswith(begin) for begin, end in _THOUGHTS)


def goes_on_thinking(template: str, message: str) -> bool:
    """Whether a message that the model continues ends inside a thought."""
    return any(end in template and message.rfind(begin) > message.rfind(end) for begin, end in _THOUGHTS)


def tool_call(name: object, arguments: object) -> ToolCall | None:
    """A call of these; None if they are none, or no JSON.

    Args:
        name: of the function.
        arguments: an object, or one as JSON in a string, which stays as it is.
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
    """What the model thought, None if it did not, and what follows it."""
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
    """The rest of a text, and its calls."""
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
    """Calls between marks. What is no call stays in the text; the end of the text may take the last mark's place."""
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
    """The calls after a mark of Mistral's: a list of them, or one with its name before its arguments."""
    if (match := _NAMED.match(text)) is not None:
        value, end = _json(text, match.end())
        call = tool_call(match[1], text[match.end() : end].rstrip()) if isinstance(value, dict) else None
        calls = None if call is None else [call]
    else:
        calls, end = _each(text, 0)
    return calls if end == len(text) else None


def _sequence(text: str) -> list[ToolCall] | None:
    """The calls that a text consists of, with semicolons between them."""
    found, at = list[ToolCall](), 0
    while at < len(text):
        calls, at = _each(text, at)
        if calls is None:
            return None
        found += calls
        at = _skip(text, at + text.startswith(";", at))
    return found or None


def _each(text: str, at: int) -> tuple[list[ToolCall] | None, int]:
    """The calls of the object, or the list of objects, at a place, None if one is no call; and the place behind it."""
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
    """The call that an object at a place is, with its arguments letter by letter; None if it is none."""
    found = {key: text[start:end] for key, start, end in _values(text, at)}
    arguments = found.get("arguments", found.get("parameters"))
    if "name" not in found or arguments is None:
        return None
    return tool_call(_DECODER.decode(found["name"]), _DECODER.decode(arguments) if arguments[0] == '"' else arguments)


def _values(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Key, place, and end of each value of the JSON object or list at a place; the keys of a list are empty."""
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
    """The value that begins at a place, and the place behind it and white space; None if there is none."""
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
