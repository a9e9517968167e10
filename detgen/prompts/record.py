"""One decoded record in, a checked request out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from detgen.engine.request import Request, SamplingParams
from detgen.errors import RequestError

# The sampling parameters and their types; whatever `SamplingParams` has, a record may set.
PARAMS: dict[str, Any] = get_type_hints(SamplingParams)
INTEGERS = tuple(name for name, type_ in PARAMS.items() if type_ in (int, int | None))
KEYS = frozenset({"id", "prompt", "messages", *PARAMS})
ROLES = ("system", "developer", "user", "assistant", "tool")

# Far below the depth at which Python's JSON encoder fails, far above that of real metadata.
_DEEPEST = 100

_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that cannot run.

    Attributes:
        index: place in the input, from 0.
        line: line or record number, from 1.
        id: the record's own id where it could be read, else the line number.
        error: the place and the reason.
        metadata: the record's other keys.
    """

    index: int
    line: int
    id: str | int
    error: str
    metadata: dict[str, Any] = field(default_factory=dict)


def parse_record(record: object, *, index: int, line: int, name: str, defaults: SamplingParams) -> Request | BadLine:
    """The request that a record describes, or why it cannot run."""
    identity: str | int = line
    metadata: dict[str, Any] = {}
    try:
        if not isinstance(record, dict):
            raise RequestError(f'a prompt must be an object such as {{"prompt": "..."}}, got {kind(record)}')
        identity = _identity(record.get("id"), line)
        metadata = _metadata(record)
        prompt, messages = _content(record)
        params = _params(record, defaults)
    except RequestError as error:
        return BadLine(index=index, line=line, id=identity, error=f"{name}:{line}: {error}", metadata=metadata)
    return Request(
        index=index, id=identity, prompt=prompt, messages=messages, params=params, metadata=metadata, line=line
    )


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), type(value).__name__)


def _identity(value: object, line: int) -> str | int:
    if value is None:
        return line
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"id must be a string or a whole number, got {kind(value)}")
    return value


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in record.items() if key not in KEYS}
    if _too_deep(metadata, _DEEPEST):
        raise RequestError(f"nested more than {_DEEPEST} deep")
    return metadata


def _too_deep(value: object, left: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_too_deep(part, left - 1) for part in parts)


def _content(record: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None]:
    prompt, messages = record.get("prompt"), record.get("messages")
    if prompt is None and messages is None:
        raise RequestError("neither prompt nor messages is given")
    if prompt is not None and messages is not None:
        raise RequestError("both prompt and messages are given; give one of them")
    if messages is not None:
        return None, _messages(messages)
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {kind(prompt)}")
    if not prompt:
        raise RequestError("prompt is empty")
    _check_text("prompt", prompt)
    return prompt, None


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list, got {kind(messages)}")
    if not messages:
        raise RequestError("messages is empty")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object with role and content, got {kind(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            given = "nothing" if role is None else repr(role)
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {given}")
        if not isinstance(content, str):
            raise RequestError(f"{where}.content must be a string, got {kind(content)}")
        _check_text(f"{where}.content", content)
    if _too_deep(messages, _DEEPEST):
        raise RequestError(f"messages is nested more than {_DEEPEST} deep")
    return messages


def _params(record: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    changes: dict[str, Any] = {name: record[name] for name in PARAMS if record.get(name) is not None}
    if not changes:
        return defaults
    params = replace(defaults, **changes)
    for text in params.stop:
        _check_text("stop", text)
    return params


def _check_text(name: str, text: str) -> None:
    """Refuse half a surrogate pair: JSON can spell it ("\\ud800"), but no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise RequestError(f"{name} holds half a character, \\u{half:04x} at position {error.start}") from None
