"""The kinds of a JSON line, each declared once: its keys, their values, and the errors for other values.

Sampling parameters, which any kind may have beside its own keys, are declared in `detgen/params.py`. A null key counts
as missing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # before Python 3.12, pydantic needs this one

from detgen.errors import RequestError
from detgen.params import PARAMETERS, check_text, shown
from detgen.prompts.structured import FORMS

Role = Literal["system", "developer", "user", "assistant", "tool"]
Url = Literal["/v1/chat/completions", "/v1/completions"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Text = Annotated[str, Field(min_length=1)]
MaybeEmpty = Annotated[str, Field(min_length=0)]  # with a bound, pydantic also finds half characters


class Part(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: MaybeEmpty


class Message(TypedDict):
    """A message of text."""

    role: Role
    content: MaybeEmpty


class MessageOfParts(TypedDict):
    """A message of parts, which are joined by line breaks."""

    role: Role
    content: list[Part]


class MessageOfCalls(TypedDict):
    """A message of the assistant that calls tools and says nothing."""

    role: Literal["assistant"]
    content: NotRequired[None]
    tool_calls: list[dict[str, Any]]


def _form(message: Any) -> str:
    """Return which of the three forms a message must have; brackets distinguish it from keys in an error's location."""
    if not isinstance(message, dict):
        return "<text>"
    content = message.get("content")
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return "<calls>"
    return "<parts>" if isinstance(content, list) and content else "<text>"


class Line(TypedDict):
    """What lines of all kinds may have."""

    id: Annotated[NotRequired[str | int | None], Field(description="The line's name in the output; else its number.")]
    metadata: Annotated[NotRequired[Any], Field(description="An object that is copied to the output.")]


class TextLine(Line):
    """A text to be continued."""

    prompt: Annotated[Text, Field(description="The text.")]


class ChatLine(Line):
    """A chat to be continued, in the form of the model's chat template."""

    messages: Annotated[
        list[
            Annotated[
                Annotated[Message, Tag("<text>")]
                | Annotated[MessageOfParts, Tag("<parts>")]
                | Annotated[MessageOfCalls, Tag("<calls>")],
                Discriminator(_form),
            ]
        ],
        Field(min_length=1, description="The messages so far."),
    ]
    tools: Annotated[NotRequired[list[dict[str, Any]] | None], Field(description="What the model may call.")]
    tool_choice: Annotated[
        NotRequired[Literal["auto", "none", "required"] | dict[str, Any] | None],
        Field(description="Whether the model may call them, or must: auto, none, required, or the one to be called."),
    ]
    parallel_tool_calls: Annotated[
        NotRequired[bool | None],
        Field(description="Whether an answer may call several; if not, it has the first call."),
    ]
    chat_template_kwargs: Annotated[
        NotRequired[dict[str, Any] | None], Field(description="Further variables of the chat template.")
    ]
    reasoning_effort: Annotated[
        NotRequired[Effort | None], Field(description="A variable of the chat template that some models have.")
    ]
    continue_final_message: Annotated[
        NotRequired[bool | None], Field(description="Go on with the assistant's last message, which is not answered.")
    ]


class TokensLine(Line):
    """A tokenized text to be continued."""

    prompt_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(min_length=1, description="The ids of the text's tokens.")
    ]


class BatchLine(TypedDict):
    """A request in the form of the OpenAI batch API."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class ScoredText(TypedDict):
    """A text that is scored as a whole."""

    text: Annotated[Text, Field(description="The text.")]


class ScoredCompletion(TypedDict):
    """A completion of the prompt beside it that is scored."""

    completion: Annotated[Text, Field(description="What follows the prompt.")]


class ScoredCompletions(TypedDict):
    """Completions of the prompt beside them that are scored."""

    completions: Annotated[
        list[Text], Field(min_length=1, description="What may follow the prompt, each scored by itself.")
    ]


# What a prompt consists of, by the key that holds it; a line has one of them.
CONTENTS = {"prompt": TextLine, "messages": ChatLine, "prompt_token_ids": TokensLine}
SCORED = {"text": ScoredText, "completion": ScoredCompletion, "completions": ScoredCompletions}
# The other keys of a chat, each with its neutral value.
CHAT_KEYS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {},
    "reasoning_effort": "",
    "continue_final_message": False,
}
assert CHAT_KEYS.keys() == ChatLine.__annotations__.keys() - {*Line.__annotations__, *CONTENTS}
# Other names of parameters in a line, and all keys that affect a request.
ALIASES = {alias: name for name, parameter in PARAMETERS.items() for alias in parameter.aliases}
KEYS = frozenset({*CONTENTS, *Line.__annotations__, *CHAT_KEYS, *PARAMETERS, *ALIASES, *FORMS})

_CHECKS = {
    key: TypeAdapter(kind).validator for key, kind in {"id": Line, **CONTENTS, **SCORED, "body": BatchLine}.items()
}
# Far below the depth at which Python's JSON encoder fails, far above that of real metadata.
_DEEPEST = 100
_WORDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}

# What values must be, by the place of an error or pydantic's name for it.
_NEEDED = {
    "id": "a string or a whole number",
    "prompt_token_ids": "a list of whole numbers",
    "messages[]": "an object with role and content",
    "messages[].role": f"one of {', '.join(get_args(Role))}",
    "messages[].content[]": 'an object such as {"type": "text", "text": "..."}',
    "messages[].content[].type": "'text'",
    "method": "POST",
    "tools": "a list of objects",
    "tool_choice": "auto, none, required or an object that names a function",
    "reasoning_effort": f"one of {', '.join(get_args(Effort))}",
    "messages[].tool_calls": "a list of objects",
    "bool_type": "true or false",
    "dict_type": "an object",
    "greater_than_equal": "a whole number of at least 0",
    "int_type": "a whole number of at least 0",
    "list_type": "a list",
    "missing": "a string",
    "string_type": "a string",
}
_BESIDES = {"messages[].content[].type": "; detgen reads only text"}


def check(key: str, line: dict[str, Any]) -> None:
    """Check a line of the kind that has this key.

    Raises:
        RequestError: naming the key, what it must be and what it is.
    """
    try:
        _CHECKS[key].validate_python(line, strict=True)
    except ValidationError as error:
        raise RequestError(_said(error, line)) from None


def _said(error: ValidationError, line: dict[str, Any]) -> str:
    """Return the message for the first error of a line."""
    first = error.errors(include_url=False)[0]
    why, place = first["type"], ""
    value: Any = line
    for part in first["loc"]:
        if isinstance(value, dict) and (part in value or why == "missing") and str(part)[:1] != "<":
            place, value = f"{place}.{part}" if place else str(part), value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            place, value = f"{place}[{part}]", value[part]
    if why in ("too_short", "string_too_short"):
        return f"{place} is empty"
    if why == "string_unicode":
        check_text(place, value)
    pattern = re.sub(r"\d+", "", place)
    needed = _NEEDED.get(pattern) or _NEEDED[why]
    told = why in ("literal_error", "greater_than_equal")
    given = "nothing" if value is None and (told or why == "missing") else shown(value) if told else kind(value)
    return f"{place} must be {needed}, got {given}{_BESIDES.get(pattern, '')}"


def kind(value: object) -> str:
    """Return the type of a JSON value in words."""
    return _WORDS.get(type(value), type(value).__name__)


def check_depth(name: str, value: object) -> None:
    """Raise if a value is nested too deeply to be written.

    Raises:
        RequestError: naming the limit.
    """
    if _too_deep(value, _DEEPEST):
        raise RequestError(f"{name and name + ' is '}nested more than {_DEEPEST} deep")


def _too_deep(value: object, left: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    if left == 0:
        return True
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list) and _too_deep(part, left - 1):
            return True
    return False
