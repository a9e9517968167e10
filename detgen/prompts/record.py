"""One decoded record in, a checked request out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts.batch import custom_id, is_batch, unpack
from detgen.prompts.chats import read_chat
from detgen.prompts.keys import KEYS, without_aliases
from detgen.prompts.kinds import CHAT_KEYS, CONTENTS, check
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
        identity = _identity(record, number)
        metadata = _metadata(record)
        content, params = _content(record), _params(record, defaults)
        request = Request(index=index, id=identity, params=params, metadata=metadata, line=line, **content)
        check_supported(record, request)
    except (RequestError, RecursionError) as error:  # the repr of a wrong value may be nested too deeply
        reason = str(error) if isinstance(error, RequestError) else "nested too deeply"
        return BadLine(index=index, line=line, id=identity, error=f"{name}:{line}: {reason}", metadata=metadata)
    return request


def _identity(record: dict[str, Any], number: str | int) -> str | int:
    value: str | int | None = record.get("id")
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int):
        check("id", record)
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


def _content(record: dict[str, Any]) -> dict[str, Any]:
    """What is to be continued, as fields of `Request`."""
    given = [key for key in CONTENTS if record.get(key) is not None]
    if not given:
        raise RequestError("neither prompt nor messages is given")
    if len(given) > 1:
        raise RequestError(f"both {given[0]} and {given[1]} are given; give one of them")
    check(given[0], record)
    if given[0] == "messages":
        return read_chat(record)
    for key, empty in CHAT_KEYS.items():
        if (value := record.get(key)) is not None and (value or type(value) is not type(empty)):
            raise RequestError(f'{key} needs messages; leave it out, or put it into "metadata" if it is no setting')
    return {"prompt": record["prompt"]} if given[0] == "prompt" else {"token_ids": tuple(record["prompt_token_ids"])}


def _params(record: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    record = without_aliases(record)
    changes = {name: record[name] for name in PARAMETERS.keys() & record.keys() if record[name] is not None}
    if not changes:
        return defaults
    return defaults.with_(**changes)
