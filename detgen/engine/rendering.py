"""Renders chats as text, by the model's own template."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from detgen.engine.bounded import Bounded
from detgen.engine.request import Request
from detgen.engine.tools import check_type
from detgen.errors import EngineError, RequestError

_LONGEST_REASON = 500


def chat_renderer(tokenizer: Any) -> Bounded[str]:
    """Return what applies a tokenizer's chat template, which may be untrusted, within limits."""

    def apply(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def least(messages: list[dict[str, Any]], *, chat_template: str, **options: Any) -> Any:
        return ([{"role": "user", "content": "a"}],), {"chat_template": chat_template}

    return Bounded(apply, least=least)


def render_chat(tokenizer: Any, model: str, request: Request, render: Bounded[str]) -> str:
    """Render a request's messages, with its tools and variables, up to where the assistant continues.

    What templates expect differs from what people send, so messages are changed as vLLM changes them: several text
    parts are joined by line breaks, the arguments of tool calls are objects instead of JSON in a string, and content
    that is null is empty, since many templates would print it as "None".

    Args:
        tokenizer: has the template.
        model: the model's name in errors.
        request: a request with `messages`.
        render: `chat_renderer` of the tokenizer.

    Raises:
        RequestError: if there is no template, or if it refuses the messages or would drop part of the request.
        EngineError: if the machine has too little memory to render it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(f"{model} has no chat template, so messages cannot be rendered; use prompt instead")
    tools, variables = request.tools or None, request.chat_template_kwargs or {}
    try:
        source = str(tokenizer.get_chat_template(tools=tools))
        _check_used(source, "tools" if tools else None, variables, tokenizer)
        text = render(
            [_message(f"messages[{i}]", message) for i, message in enumerate(request.messages or ())],
            chat_template=source,
            tools=tools,
            add_generation_prompt=not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            **variables,
        )
    except (RequestError, EngineError):
        raise
    except Exception as e:  # a template may raise anything
        raise RequestError(f"the chat template refuses these messages: {shortened(e)}") from e
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise RequestError(f"the messages hold half a character, \\u{half:04x}, where they are rendered") from None
    return text


def shortened(error: BaseException) -> str:
    """Return the reason of an error, shortened: a library's own may quote the whole text."""
    reason = str(error)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


def _check_used(source: str, tools: str | None, variables: dict[str, Any], tokenizer: Any) -> None:
    """Refuse what the template would silently drop, and variables that a line may not set."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
    for name in variables:
        if name in taken:
            raise RequestError(f"chat_template_kwargs cannot set {name}; give it beside messages, if it is known there")
    for name in ([tools] if tools else []) + list(variables):
        if not name.isidentifier() or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source):
            them = "them" if name == "tools" else "it"
            raise RequestError(f"the model's chat template does not use {name or repr(name)}; leave {them} out")


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = "\n".join(part["text"] for part in content)
    elif content is None:
        changed["content"] = ""
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return changed


def _call(place: str, call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    check_type(place, call)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
