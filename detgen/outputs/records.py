"""All that a run writes, declared once: lines of outputs, scores, errors and the acceptance log, and results.

The writer builds these objects, with their keys in this order; `parse_line` checks them; the report and the audit read
them; keys that are marked as such are columns of an export; docs/lines.md has their tables. To add a key, declare it
here and fill it where the line is made.
"""

from __future__ import annotations

import json
from ctypes import c_float
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict  # pydantic accepts no other before Python 3.12

from detgen.engine.request import TokenRecord


@dataclass(frozen=True, slots=True)
class Column:
    """Marks a key that is a column of an export.

    Attributes:
        place: position among the columns.
        type: Arrow's name of the type of its values; [type] is a list of them.
    """

    place: int
    type: str | list[str]


_declared = with_config(ConfigDict(extra="forbid", strict=True))

_T = TypeVar("_T")
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Place = Annotated[int, Field(ge=0, le=2**62)]
_Byte = Annotated[int, Field(ge=0, lt=256)]
_Text = str | list[_Byte]  # text of a token: a list if its bytes are not whole characters
_Pair = Annotated[tuple[_Count, _T], Strict(False)]  # a list in JSON
_Metadata = Annotated[dict[str, Any], Column(10, "string"), Field(description="the line's other keys, if it has any")]

_Triple = Annotated[tuple[_Count, float | None, _Text], Strict(False)]


@_declared
class Head(TypedDict):
    """Which sample a line belongs to."""

    id: Annotated[str | int, Column(0, "string"), Field(description="the prompt's `id`, else its line number")]
    index: Annotated[_Place, Column(1, "int64"), Field(description="place of the prompt in the input, from 0")]
    sample: Annotated[_Place, Column(2, "int64"), Field(description="which of the prompt's samples, from 0")]


@_declared
class Echo(TypedDict):
    """What `--echo` repeats of the prompt: one of the keys, or none."""

    prompt: NotRequired[Annotated[str, Column(3, "string"), Field(description="with `--echo`: the prompt")]]
    messages: NotRequired[Annotated[list[dict[str, Any]], Field(description="with `--echo`: a chat")]]
    prompt_token_ids: NotRequired[Annotated[list[_Count], Field(description="with `--echo`: a prompt of token ids")]]


@_declared
class TokenEntry(TypedDict):
    """The log-probabilities at one position."""

    token: Annotated[_Count, Field(description="the chosen token's id")]
    logprob: Annotated[float | None, Field(description="its natural log-probability")]
    top: Annotated[
        list[_Triple], Field(description="id, log-probability and text of the most likely tokens, best first")
    ]
    text: Annotated[_Text, Field(description="the chosen token's text; a list of its bytes if it is half a character")]


@_declared
class CalledFunction(TypedDict):
    """The function of a call."""

    name: str
    arguments: str


@_declared
class Call(TypedDict):
    """A call of a tool, as in OpenAI's API, and what is wrong with it, if anything."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    error: NotRequired[str]


@_declared
class TextLine(Head, Echo):
    """A line of `outputs.jsonl`: a sample that is a text."""

    text: Annotated[str, Column(4, "string"), Field(description="the text, cut before a stop string")]
    reasoning_content: NotRequired[
        Annotated[
            str, Column(14, "string"), Field(description="of an answer with parts: what the model thought, if it did")
        ]
    ]
    content: NotRequired[
        Annotated[
            str | None,
            Column(15, "string"),
            Field(description="of an answer with parts: what it says; null if that is nothing"),
        ]
    ]
    tool_calls: NotRequired[
        Annotated[
            list[Call],
            Column(16, "string"),
            Field(description="of an answer with parts: the tools that it calls, if it does"),
        ]
    ]
    token_ids: Annotated[list[_Count], Column(11, ["int64"]), Field(description="its tokens, the end included")]
    finish_reason: Annotated[
        Literal["stop", "length"],
        Column(5, "string"),
        Field(description="`stop` (it ended, or was stopped) or `length`"),
    ]
    prompt_tokens: Annotated[_Count, Column(6, "int64"), Field(description="tokens of the prompt")]
    completion_tokens: Annotated[_Count, Column(7, "int64"), Field(description="tokens of the text")]
    seed: Annotated[_Count, Column(8, "int64"), Field(description="key of the sampling noise")]
    thoughts: NotRequired[
        Annotated[list[_Pair[str]], Field(description="of a model that thinks: first position and text of each")]
    ]
    logprobs: NotRequired[
        Annotated[list[TokenEntry], Column(12, ["float64"]), Field(description="with `logprobs`: an object per token")]
    ]
    metadata: NotRequired[_Metadata]
    stop_reason: Annotated[
        str | _Count | None,
        Column(13, "string"),
        Field(description="the stop string or the id of the stop token that ended it; null if neither did"),
    ]


@_declared
class ErrorLine(Head):
    """A line of `outputs.jsonl`: a prompt that could not run, or a sample that ended with an error."""

    error: Annotated[str, Column(9, "string"), Field(description="file, line and reason")]
    metadata: NotRequired[_Metadata]


@_declared
class ScoredToken(TypedDict):
    """One token of a score."""

    token: Annotated[_Count, Field(description="its id")]
    logprob: Annotated[float | None, Field(description="its natural log-probability")]
    greedy: Annotated[bool, Field(description="whether it is the most likely one")]
    text: Annotated[_Text, Field(description="its text; a list of its bytes if it is half a character")]


@_declared
class ScoreLine(Head, Echo):
    """A line of `outputs.jsonl` of `detgen score`: a completion, or a whole text."""

    completion: NotRequired[Annotated[str | list[_Count], Field(description="with `--echo`: the completion")]]
    text: NotRequired[Annotated[str, Field(description="with `--echo`: a text that is scored as a whole")]]
    logprob: Annotated[float | None, Field(description="the sum of its tokens' log-probabilities")]
    is_greedy: Annotated[bool, Field(description="whether greedy generation gives it")]
    token_ids: Annotated[list[_Count], Field(description="its tokens")]
    prompt_tokens: Annotated[_Count, Field(description="tokens of the prompt; 0 of a text as a whole")]
    completion_tokens: Annotated[_Count, Field(description="tokens of the completion")]
    logprobs: Annotated[list[ScoredToken], Field(description="an object per token")]
    metadata: NotRequired[_Metadata]


# Keys that a line of the acceptance log may omit, to save space for each token, and what omitting them means.
LEFT_OUT: dict[str, Any] = {"token": None, "drafter": "none", "drafted": None, "logprob": None, "margin": None}


def _log_keys() -> dict[str, Any]:
    found = get_type_hints(Head, include_extras=True) | get_type_hints(TokenRecord, include_extras=True)
    del found["id"]  # it is in the line of outputs.jsonl
    for name in LEFT_OUT:
        type_, *marks = get_args(found[name])
        (type_,) = (each for each in get_args(type_) or (type_,) if each is not NoneType)
        found[name] = NotRequired[Annotated[type_, *marks]]
    return found


# A line of `acceptance.jsonl`: a committed token, or a drafted one that was rolled back.
AcceptanceLine = _declared(TypedDict("AcceptanceLine", _log_keys()))  # type: ignore[operator]


def log_entry(line: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a line of the acceptance log: an index, a sample, and the fields of a `TokenRecord`.

    Args:
        line: the line; values that no run writes are kept.
    """
    found = {**LEFT_OUT, **line}
    if found["drafted"] is None and found.get("status") == "accepted":
        found["drafted"] = found["token"]
    for name in ("logprob", "margin"):
        if isinstance(found[name], float):
            found[name] = c_float(found[name]).value
    return found


class ResultError(TypedDict):
    """Why a request has no result."""

    code: str
    message: str


class ResponseError(TypedDict):
    """The body of an error response."""

    message: str
    type: str
    param: None
    code: None


class Usage(TypedDict):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Body(TypedDict):
    """The body of a response: a chat completion or a completion, as in the OpenAI API."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage
    system_fingerprint: str


class Response(TypedDict):
    """The response to a request."""

    status_code: int
    request_id: str
    body: Body | dict[str, ResponseError]


class ResultLine(TypedDict):
    """A line of `results.jsonl`: a request and its response, as in the OpenAI batch API."""

    id: str
    custom_id: str
    response: Response
    error: ResultError | None


Line = dict[str, Any]  # a line of `outputs.jsonl`: a TextLine, ErrorLine or ScoreLine


def parse_line(raw: bytes) -> Line | None:
    """Parse a line of `outputs.jsonl`; None if it is not one that detgen writes."""
    try:
        found = json.loads(raw.decode())  # given bytes, it would guess the encoding
    except (ValueError, RecursionError):
        return None
    return found if is_line(found) else None


def is_line(found: object) -> TypeGuard[Line]:
    """Return whether an object is a line of `outputs.jsonl`."""
    if not isinstance(found, dict):
        return False
    return _is(ErrorLine if "error" in found else ScoreLine if "is_greedy" in found else TextLine, found)


def is_acceptance(raw: bytes) -> bool:
    """Return whether bytes are a line of the acceptance log."""
    try:
        return _is(AcceptanceLine, json.loads(raw.decode()))
    except (ValueError, RecursionError):
        return False


def _is(kind: type, found: object) -> bool:
    try:
        _checked(kind).validate_python(found)
    except ValidationError as error:
        # A string may hold half a surrogate pair, which JSON can write and pydantic rejects.
        return all(each["type"] == "string_unicode" for each in error.errors(include_url=False))
    except RecursionError:
        return False
    return True


@cache
def _checked(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def in_order(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return keys and values of a line in the order of its declaration.

    Raises:
        KeyError: if one of the keys is not declared.
    """
    found = {name: values[name] for name in _names(kind) if name in values}
    if len(found) < len(values):
        raise KeyError(*(values.keys() - found.keys()))
    return found


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(get_type_hints(kind))


class Key(NamedTuple):
    """A key of a declaration: the type of its values, a description, and its column in an export, if it is one."""

    type: Any
    text: str
    column: Column | None


def keys_of(kind: type) -> dict[str, Key]:
    """Return the keys of one of the declarations, in order."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is NotRequired:
            (hint,) = get_args(hint)
        type_, *marks = get_args(hint)
        text = next(mark.description for mark in marks if isinstance(mark, FieldInfo) and mark.description)
        found[name] = Key(type_, text, next((mark for mark in marks if isinstance(mark, Column)), None))
    return found


def columns() -> dict[str, str | list[str]]:
    """Return the columns of an export with the types of their values, in order."""
    keys = keys_of(TextLine) | keys_of(ErrorLine)
    marked = {name: key.column for name, key in keys.items() if key.column is not None}
    return {name: column.type for name, column in sorted(marked.items(), key=lambda each: each[1].place)}
