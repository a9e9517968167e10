"""One decoded record in, a checked request to score out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

from detgen.engine.request import Request
from detgen.engine.score_requests import ScoreRequest
from detgen.errors import RequestError
from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts.keys import ALIASES
from detgen.prompts.kinds import CONTENTS, SCORED, check
from detgen.prompts.record import BadLine, parse_record
from detgen.prompts.record_source import Prompts
from detgen.prompts.record_values import check_depth


def read_scores(
    prompts: Prompts, limit: int | None = None, *, echo: bool = False, say: Callable[[str], None] | None = None
) -> Iterator[Request | BadLine]:
    """The first `limit` requests to score, in input order; arguments and errors as those of `Prompts.read`.

    A line of plain text is a text to be scored as a whole. So is what stands in a column that the user names, where
    there are no completions beside it.
    """
    parse = partial(parse_score, texts=prompts.format == "txt" or prompts.column is not None)
    return prompts.read(SamplingParams(), limit, echo=echo, say=say, parse=parse)


def parse_score(
    record: object,
    *,
    index: int,
    line: int,
    name: str,
    defaults: SamplingParams,
    number: str | int,
    texts: bool = False,
) -> Request | BadLine:
    """The request to score that a record describes, or why it cannot run.

    Sampling parameters decide nothing of a score and become metadata, as unknown keys do.

    Args:
        record: has `prompt`, `messages` or `prompt_token_ids` with `completion` or `completions`, or `text`.
        index: place in the input, from 0.
        line: line or record number, from 1.
        name: of the input, before line numbers.
        defaults: parameters of the request, which decide nothing.
        number: the record's id if it has none of its own.
        texts: whether a prompt without completions is a text to be scored as a whole.
    """
    settings: dict[str, Any] = {}
    asked = record
    if isinstance(record, dict):
        settings = {key: value for key, value in record.items() if key in PARAMETERS or key in ALIASES}
        asked = {key: value for key, value in record.items() if key not in SCORED and key not in settings}
        if record.get("text") is not None and not any(asked.get(key) for key in CONTENTS):
            asked["prompt"] = "text"  # any will do: what holds for all lines is judged, and then the text
    found = parse_record(asked, index=index, line=line, name=name, defaults=defaults, number=number)
    if isinstance(record, dict) and (metadata := {**settings, **found.metadata}):
        found = replace(found, metadata=metadata)
    if isinstance(found, BadLine):
        return found
    assert isinstance(record, dict)
    try:
        check_depth("", settings)
        shared = {field.name: getattr(found, field.name) for field in fields(found)}
        if record.get("text") is not None:
            return ScoreRequest(**{**shared, "prompt": _text(record)})
        return ScoreRequest(**shared, completions=_completions(record, texts=texts))
    except RequestError as error:
        return BadLine(index=index, line=line, id=found.id, error=f"{name}:{line}: {error}", metadata=found.metadata)


def _text(record: dict[str, Any]) -> str:
    """A text that is scored as a whole."""
    for key in (*CONTENTS, "completion", "completions"):
        if record.get(key):
            raise RequestError(f"both {key} and text are given; give a prompt with completions, or a text alone")
    check("text", record)
    text: str = record["text"]
    return text


def _completions(record: dict[str, Any], *, texts: bool) -> tuple[str, ...] | None:
    """The completions of a prompt; None if there are none and it is a text."""
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
