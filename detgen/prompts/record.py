"""One decoded record in, a checked request out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import SamplingParams, check_text
from detgen.prompts.batch import custom_id, is_batch, unpack
from detgen.prompts.chats import read_chat_settings, read_messages
from detgen.prompts.keys import CONTENTS, KEYS, PARAMS, without_aliases
from detgen.prompts.record_values import check_depth, kind
from detgen.prompts.unsupported import check_supported


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


def parse_record(
    record: object, *, index: int, line: int, name: str, defaults: SamplingParams, number: str | int
) -> Request | BadLine:
    """The request that a record describes, or why it cannot run; `number` is its id if it has none of its own."""
    identity: str | int = number
    metadata: dict[str, Any] = {}
    try:
        if not isinstance(record, dict):
            raise RequestError(f'a prompt must be an object such as {{"prompt": "..."}}, got {kind(record)}')
        if is_batch(record):
            identity = number if (own := custom_id(record)) is None else own
            record, defaults = unpack(record, defaults)
        identity = _identity(record.get("id"), number)
        metadata = _metadata(record)
        prompt, messages, token_ids = _content(record)
        request = Request(
            index=index,
            id=identity,
            prompt=prompt,
            messages=messages,
            token_ids=token_ids,
            params=_params(record, defaults),
            metadata=metadata,
            line=line,
            **read_chat_settings(record, messages),
        )
        check_supported(record, request)
    except (RequestError, RecursionError) as error:  # the repr of a wrong value may be nested too deeply
        reason = str(error) if isinstance(error, RequestError) else "nested too deeply"
        return BadLine(index=index, line=line, id=identity, error=f"{name}:{line}: {reason}", metadata=metadata)
    return request


def _identity(value: object, number: str | int) -> str | int:
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"id must be a string or a whole number, got {kind(value)}")
    return value


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    """The unknown keys, and those of the object `metadata`; what is there but no object is an unknown key, too."""
    metadata = {key: value for key, value in record.items() if key not in KEYS}
    own = record.get("metadata")
    check_depth("", metadata)
    check_depth("", own)
    if isinstance(own, dict):
        for key, value in own.items():
            if key in metadata and metadata[key] != value:
                raise RequestError(f"{key!r} is beside metadata and, with another value, in it; keep one of them")
        metadata |= own
    elif own is not None:
        metadata["metadata"] = own
    return metadata


def _content(
    record: dict[str, Any],
) -> tuple[str | None, list[dict[str, Any]] | None, tuple[int, ...] | None]:
    prompt, messages, token_ids = (record.get(key) for key in CONTENTS)
    given = [key for key in CONTENTS if record.get(key) is not None]
    if not given:
        raise RequestError("neither prompt nor messages is given")
    if len(given) > 1:
        raise RequestError(f"both {given[0]} and {given[1]} are given; give one of them")
    if messages is not None:
        return None, read_messages(messages), None
    if token_ids is not None:
        return None, None, _token_ids(token_ids)
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {kind(prompt)}")
    if not prompt:
        raise RequestError("prompt is empty")
    check_text("prompt", prompt)
    return prompt, None, None


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestError(f"prompt_token_ids must be a list of whole numbers, got {kind(value)}")
    if not value:
        raise RequestError("prompt_token_ids is empty")
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            shown = str(token) if isinstance(token, int) and not isinstance(token, bool) else kind(token)
            raise RequestError(f"prompt_token_ids[{place}] must be a whole number of at least 0, got {shown}")
    return tuple(value)


def _params(record: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    record = without_aliases(record)
    changes: dict[str, Any] = {name: record[name] for name in PARAMS if record.get(name) is not None}
    if not changes:
        return defaults
    return defaults.with_(**changes)
