"""Lines of results by the types of the openai package, strictly applied."""

from __future__ import annotations

from typing import Any, Literal

from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """The package has no types for the lines of a batch; these are those of the API's description."""

    model_config = ConfigDict(extra="forbid", strict=True)


class APIError(Strict):
    """What an API says of a request that failed."""

    message: str
    type: str
    param: None
    code: None


class Failure(Strict):
    """The body of a response that is an error."""

    error: APIError


class Response(Strict):
    """What an API answered."""

    status_code: Literal[200, 400, 500]
    request_id: str
    body: dict[str, Any]


class BatchError(Strict):
    """Why there is no result."""

    code: str
    message: str


class BatchLine(Strict):
    """A line of results."""

    id: str
    custom_id: str
    response: Response
    error: BatchError | None


def check(line: bytes) -> ChatCompletion | TextCompletion | Failure:
    """The body of a line, by its type; nothing of it may be unknown to that type."""
    found = BatchLine.model_validate_json(line)
    body = found.response.body
    if found.error is not None:
        assert found.response.status_code != 200
        return Failure.model_validate(body, strict=True)
    assert found.response.status_code == 200
    type_: Any = ChatCompletion if body["object"] == "chat.completion" else TextCompletion
    parsed = type_.model_validate(body, strict=True)
    assert parsed.model_dump(exclude_unset=True) == body
    _no_extras(parsed)
    return parsed


def _no_extras(part: Any) -> None:
    if isinstance(part, list):
        for each in part:
            _no_extras(each)
    elif isinstance(part, BaseModel):
        assert set(part.model_extra or ()) <= {"reasoning_content"}  # as other servers have it
        for name in type(part).model_fields:
            _no_extras(getattr(part, name))
