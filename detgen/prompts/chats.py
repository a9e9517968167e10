"""Chats as people have them: messages, tools and variables of the template, checked."""

from __future__ import annotations

from typing import Any

from detgen.errors import RequestError
from detgen.params import check_text
from detgen.prompts.keys import CHAT_KEYS
from detgen.prompts.record_values import check_depth, kind

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages that a template can be tried on.

    Raises:
        RequestError: they are not messages, or hold something else than text.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, got {kind(messages)}")
    if not messages:
        raise RequestError("messages is empty")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object with role and content, got {kind(message)}")
        role = message.get("role")
        if role not in ROLES:
            given = "nothing" if role is None else repr(role)
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {given}")
        _check_content(where, message)
    check_depth("messages", messages)
    return messages


def _check_content(where: str, message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        for place, part in enumerate(content):
            _check_part(f"{where}.content[{place}]", part)
    elif content is None and message["role"] == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RequestError(f"{where}.tool_calls must be a list of objects")
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string, got {kind(content)}")
    else:
        check_text(f"{where}.content", content)


def _check_part(where: str, part: object) -> None:
    if not isinstance(part, dict):
        raise RequestError(f'{where} must be an object such as {{"type": "text", "text": "..."}}, got {kind(part)}')
    if part.get("type") != "text":
        given = "none" if part.get("type") is None else repr(part["type"])
        raise RequestError(f"{where}.type must be 'text', got {given[:80]}; detgen reads text alone")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string, got {kind(part.get('text'))}")
    check_text(f"{where}.text", part["text"])


def read_chat_settings(record: dict[str, Any], messages: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What a record asks of the chat template, as fields of `Request`.

    Raises:
        RequestError: it is of a wrong type, or there is no chat that it could be for.
    """
    tools, variables, goes_on = (record.get(key) for key in CHAT_KEYS)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        given = "a list of others" if isinstance(tools, list) else kind(tools)
        raise RequestError(f"tools must be a list of objects, got {given}")
    if variables is not None and not isinstance(variables, dict):
        raise RequestError(f"chat_template_kwargs must be an object, got {kind(variables)}")
    if goes_on is not None and not isinstance(goes_on, bool):
        raise RequestError(f"continue_final_message must be true or false, got {kind(goes_on)}")
    if messages is None:
        for key in CHAT_KEYS:
            if record.get(key):
                raise RequestError(f'{key} needs messages; leave it out, or put it into "metadata" if it is no setting')
    elif goes_on and (messages[-1]["role"] != "assistant" or not _text(messages[-1].get("content")).strip()):
        raise RequestError("continue_final_message needs a last message of the assistant that has a text")
    check_depth("tools", tools)
    check_depth("chat_template_kwargs", variables)
    return {
        "tools": tools or None,
        "chat_template_kwargs": variables or None,
        "continue_final_message": bool(goes_on),
    }


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""
