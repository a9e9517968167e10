"""Chats as people have them: messages, tools and variables of the template, as a request has them."""

from __future__ import annotations

from typing import Any

from detgen.errors import RequestError
from detgen.prompts.record_values import check_depth


def read_chat(record: dict[str, Any]) -> dict[str, Any]:
    """The chat of a record that is checked (`kinds.check`), as fields of `Request`.

    Raises:
        RequestError: it is nested too deeply, or there is nothing to go on with.
    """
    messages = record["messages"]
    if goes_on := bool(record.get("continue_final_message")):
        last = messages[-1]
        if last["role"] != "assistant" or not _text(last.get("content")).strip():
            raise RequestError("continue_final_message needs a last message of the assistant that has a text")
    asked = {key: record.get(key) for key in ("messages", "tools", "chat_template_kwargs")}
    for key, value in asked.items():
        check_depth(key, value)
    return {key: value or None for key, value in asked.items()} | {"continue_final_message": goes_on}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""
