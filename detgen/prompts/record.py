"""Turn decoded records into checked requests to generate or to score."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from detgen.engine.request import Request
from detgen.engine.score_requests import ScoreRequest
from detgen.engine.tools import called, functions
from detgen.errors import RequestError
from detgen.params import FREE, PARAMETERS, SamplingParams
from detgen.prompts.batch import is_batch, unpack
from detgen.prompts.kinds import ALIASES, CHAT_KEYS, CONTENTS, KEYS, SCORED, check, check_depth, kind
from detgen.prompts.structured import FORMS, asked_form
from detgen.prompts.unsupported import check_supported


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that cannot run.

    Attributes:
        index: place in the input, from 0.
        line: line or record number, from 1.
        id: the record's own id if it could be read, else the line number.
        error: the reason; from `Prompts.read`, with the place before it.
        metadata: the record's other keys.
    """

    index: int
    line: int
    id: str | int
    error: str
    metadata: dict[str, Any] = field(default_factory=dict)


def parse_record(
    record: object, *, index: int, line: int, number: str | int, defaults: SamplingParams
) -> Request | BadLine:
    """Return the request that a record describes, or why it cannot run.

    Args:
        record: any value.
        index: place in the input, from 0.
        line: line or record number, from 1.
        number: the id for a record that has none.
        defaults: parameters that the record does not set.
    """
    identity: str | int = number
    metadata: dict[str, Any] = {}
    try:
        if not isinstance(record, dict):
            raise RequestError(f'a prompt must be an object such as {{"prompt": "..."}}, got {kind(record)}')
        if is_batch(record):
            identity = own if isinstance(own := record.get("custom_id"), str) else number
            record, defaults = unpack(record, defaults)
        identity = _identity(record, number)
        metadata = _metadata(record)
        content, (params, form_key) = _content(record), _params(record, defaults)
        request = Request(index, identity, params=params, metadata=metadata, line=line, form_key=form_key, **content)
        check_supported(record, request)
    except (RequestError, RecursionError) as error:  # the repr of a wrong value may be nested too deeply
        reason = str(error) if isinstance(error, RequestError) else "nested too deeply"
        return BadLine(index=index, line=line, id=identity, error=reason, metadata=metadata)
    return request


def parse_score(record: object, *, texts: bool = False, **place: Any) -> Request | BadLine:
    """Return the request to score that a record describes, or why it cannot run.

    Sampling parameters have no effect on a score and become metadata, like unknown keys.

    Args:
        record: `prompt`, `messages` or `prompt_token_ids` with `completion` or `completions`, or `text`.
        texts: whether a prompt without completions is a text to score as a whole.
        place: as for `parse_record`.
    """
    if not isinstance(record, dict):
        return parse_record(record, **place)
    settings = {key: value for key, value in record.items() if key in (*PARAMETERS, *ALIASES, *FORMS)}
    asked = {key: value for key, value in record.items() if key not in SCORED and key not in settings}
    if record.get("text") is not None and not any(asked.get(key) for key in CONTENTS):
        asked["prompt"] = "text"  # any prompt will do: only what holds for all lines is checked here, and then the text
    found = parse_record(asked, **place)
    if metadata := {**settings, **found.metadata}:
        found = replace(found, metadata=metadata)
    if isinstance(found, BadLine):
        return found
    try:
        check_depth("", settings)
        shared = {field.name: getattr(found, field.name) for field in fields(found)}
        if record.get("text") is not None:
            return ScoreRequest(**{**shared, "prompt": _text(record)})
        return ScoreRequest(**shared, completions=_completions(record, texts=texts))
    except RequestError as error:
        return BadLine(place["index"], place["line"], found.id, str(error), found.metadata)


def _identity(record: dict[str, Any], number: str | int) -> str | int:
    value: str | int | None = record.get("id")
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int):
        check("id", record)
    return value


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    """Return the unknown keys and those of the object `metadata`, itself an unknown key if it is not an object."""
    metadata = {key: value for key, value in record.items() if key not in KEYS}
    own = record.get("metadata")
    check_depth("", metadata)
    check_depth("", own)
    if isinstance(own, dict):
        for key, value in own.items():
            if key in metadata and metadata[key] != value:
                raise RequestError(
                    f"{key!r} is given beside metadata and, with another value, inside it; keep one of them"
                )
        metadata |= own
    elif own is not None:
        metadata["metadata"] = own
    return metadata


def _content(record: dict[str, Any]) -> dict[str, Any]:
    """Return the content to continue as fields of `Request`."""
    given = [key for key in CONTENTS if record.get(key) is not None]
    if not given:
        raise RequestError("neither prompt nor messages is given")
    if len(given) > 1:
        raise RequestError(f"both {given[0]} and {given[1]} are given; give one of them")
    check(given[0], record)
    if given[0] == "messages":
        return _chat(record)
    for key, empty in CHAT_KEYS.items():
        value = record.get(key)
        if value is not None and value != empty and (value or type(value) is not type(empty)):
            raise RequestError(f'{key} needs messages; leave it out, or put it into "metadata" if it is not a setting')
    return {"prompt": record["prompt"]} if given[0] == "prompt" else {"token_ids": tuple(record["prompt_token_ids"])}


def _chat(record: dict[str, Any]) -> dict[str, Any]:
    if goes_on := bool(record.get("continue_final_message")):
        last = record["messages"][-1]
        content = last.get("content") or ""
        text = "".join(part["text"] for part in content) if isinstance(content, list) else content
        if last["role"] != "assistant" or not text.strip():
            raise RequestError("continue_final_message needs a last message of the assistant that has a text")
    asked = {key: record.get(key) for key in ("messages", "tools", "tool_choice", "chat_template_kwargs")}
    for key, value in asked.items():
        check_depth(key, value)
    if (effort := record.get("reasoning_effort")) is not None:
        variables = asked["chat_template_kwargs"] or {}
        if variables.get("reasoning_effort", effort) != effort:
            raise RequestError("reasoning_effort has another value in chat_template_kwargs; give it once")
        asked["chat_template_kwargs"] = {**variables, "reasoning_effort": effort}
    given = {key: value or None for key, value in asked.items()} | {"continue_final_message": goes_on}
    given["parallel_tool_calls"] = record.get("parallel_tool_calls") is not False
    called(asked["tool_choice"], list(functions(asked["tools"])))
    return given | {"tool_choice": asked["tool_choice"] or "auto"}


def _params(record: dict[str, Any], defaults: SamplingParams) -> tuple[SamplingParams, str | None]:
    """Return the parameters of a record, and its name for the form that it asks for, or None."""
    record = _without_aliases(record)
    form, form_key = asked_form(record)
    changes = {name: record[name] for name in PARAMETERS.keys() & record.keys() if record[name] is not None} | form
    if record.get("messages") and record.get("tool_choice") not in (None, "auto", "none"):
        defaults = defaults.with_(**FREE)  # the line's own form replaces the run's
    try:
        return (defaults.with_(**changes) if changes else defaults), form_key
    except RequestError as error:
        name, _, said = str(error).partition(" ")
        raise RequestError(f"{form_key if name in form else name} {said}") from None


def _without_aliases(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with keys named as in `SamplingParams`; raise if two names disagree."""
    given = [alias for alias in ALIASES if alias in record]
    if not given:
        return record
    plain = {key: value for key, value in record.items() if key not in ALIASES}
    spelled: dict[str, str] = {}
    for alias in given:
        name, value = ALIASES[alias], record[alias]
        if value is None:
            continue
        if plain.get(name) is not None and plain[name] != value:
            other = spelled.get(name, name)
            raise RequestError(
                f"{other} and {alias} mean the same and are given as {plain[name]!r} and {value!r}; give one of them"
            )
        plain[name] = value
        spelled.setdefault(name, alias)
    return plain


def _text(record: dict[str, Any]) -> str:
    """Return a text to score as a whole."""
    for key in (*CONTENTS, "completion", "completions"):
        if record.get(key):
            raise RequestError(f"both {key} and text are given; give a prompt with completions, or a text alone")
    check("text", record)
    text: str = record["text"]
    return text


def _completions(record: dict[str, Any], *, texts: bool) -> tuple[str, ...] | None:
    """Return the completions of a prompt; None if it is a text to score as a whole."""
    one: Any = record.get("completion")
    several: Any = record.get("completions")
    if one is not None and several is not None:
        raise RequestError("both completion and completions are given; give one of them")
    if one is None and several is None:
        if texts:
            return None
        raise RequestError(
            "there is neither completion nor completions; a text to be scored as a whole is given as text"
        )
    check("completions" if one is None else "completion", record)
    return tuple(several) if one is None else (one,)
