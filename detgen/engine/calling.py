"""Makes grammars for llguidance that force a text to call a tool, in the marks of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from detgen.engine.answer import NAME, spelling_of
from detgen.engine.answering import Answering
from detgen.engine.grammars import JSON, fault
from detgen.engine.request import Request
from detgen.engine.schemas import exact
from detgen.engine.tools import called, functions
from detgen.errors import RequestError

# Reasoning, if the template has it, and the line breaks after it.
_REASON = """
breaks: /\\n{0,2}/
reason%s: /(.|\\n)*/
"""


def grammar_of(request: Request, prompt: list[int], answering: Answering) -> str | None:
    """Return the grammar that a request's `tool_choice` asks for; None if it need not call a tool.

    Args:
        request: a chat.
        prompt: its token ids.
        answering: knows the template.

    Raises:
        RequestError: if the template's way to spell calls is unknown, or the choice is invalid.
    """
    tools = functions(request.tools)
    names = called(request.tool_choice, list(tools))
    if not names:
        return None
    think, kind = spelling_of(template := answering.template(request))
    if kind is None:
        raise RequestError(
            "tool_choice needs a chat template that spells calls in a way that detgen knows (docs/answers.md);"
            " leave it out, or make it auto"
        )
    if kind == "[ARGS]" and (strange := [name for name in names if not re.fullmatch(NAME, name)]):
        raise RequestError(
            f"tool_choice cannot be combined with a tool called {strange[0]!r}: in calls as this model spells them, a"
            " name has letters, digits, '_', '.' and '-'"
        )
    schemas = {name: json.dumps(_schema(name, tools[name])) for name in names}
    many = request.tool_choice == "required" and request.parallel_tool_calls
    text = _calls(kind, schemas, answering.spelled, many=many)
    if think is None:
        return f"start: calls\n{text}"
    begin, end = (answering.spelled(mark) for mark in think)
    ends_itself = end.startswith('"')  # else it is a special token, which no expression matches
    reason = _REASON % (f"[suffix={end}]" if ends_itself else "")
    thought = "reason breaks" if ends_itself else f"reason {end} breaks"
    opened = answering.opened(template, request, prompt)
    begins = f"thought: {thought}" if opened else f"thought: ({begin} {thought})?"
    return f"start: thought calls\n{begins}\n{reason}{text}"


def _calls(kind: str, schemas: dict[str, str], spelled: Callable[[str], str], *, many: bool) -> str:
    """Return the rule `calls` and the rules that it needs, given the schemas of arguments by the names of tools."""
    if kind == "<tool_call>":
        more = r' ("\n" call)*' if many else ""
        call = rf'call: {spelled(kind)} "\n" object "\n" {spelled("</tool_call>")}'
        return f"calls: call{more}\n{call}\n{_objects(schemas, 'arguments')}"
    if kind == "[ARGS]":
        each = " | ".join(f"{json.dumps(name)} {spelled(kind)} p{i}" for i, name in enumerate(schemas))
        return f"calls: call{'+' * many}\ncall: {spelled('[TOOL_CALLS]')} ({each})\n{_parameters(schemas)}"
    if kind == "[TOOL_CALLS]":
        more = ' (", " object)*' if many else ""
        return f'calls: {spelled(kind)} "[" object{more} "]"\n{_objects(schemas, "arguments")}'
    return f"calls: object\n{_objects(schemas, 'parameters')}"  # only one, as Llama's templates require


def _objects(schemas: dict[str, str], arguments: str) -> str:
    """Return the rule `object` for a call of one of the tools."""
    each = []
    for i, name in enumerate(schemas):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '
        each.append(f'{json.dumps(head, ensure_ascii=False)} p{i} "}}"')
    return f"object: {' | '.join(each)}\n{_parameters(schemas)}"


def _parameters(schemas: dict[str, str]) -> str:
    return "".join(f"p{i}: %json {schema}\n" for i, schema in enumerate(schemas.values()))


def _schema(name: str, function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("parameters")
    if given is None:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        raise RequestError(f"tool_choice needs parameters of {name} that are a schema of an object")
    if reason := fault("guided_json", json.dumps(given)):
        raise RequestError(f"tool_choice cannot be combined with the parameters of {name}: {reason}")
    return {**json.loads(exact(json.dumps(given))), "type": "object", "x-guidance": JSON}
