"""Turn other programs' keys for the form of a text into parameters.

These are OpenAI's `response_format`, and vLLM's `structured_outputs`, whose older names are those of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from detgen.errors import RequestError
from detgen.params import FREE, GUIDES, shown

_NAMES = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
_ANY_OBJECT = {"guided_json": {"type": "object"}}
_Form = tuple[dict[str, Any], str | None]  # parameters, and the record's name for them; None for a text without a form
# The types of `response_format`, and the key beside each; servers such as llama.cpp's give json_object a schema.
_BESIDE = {"text": None, "json_object": "schema", "json_schema": "json_schema"}


def _response_format(value: Any) -> _Form:
    asked = {"type": value} if isinstance(value, str) else value
    kind = str(asked.get("type")) if isinstance(asked, dict) else ""
    if kind not in _BESIDE:
        raise RequestError(f"response_format must have a type text, json_object or json_schema, got {shown(value)}")
    if other := [key for key, part in asked.items() if part is not None and key not in ("type", _BESIDE[kind])]:
        raise RequestError(f"response_format.{other[0]} is not supported with the type {kind}; leave it out")
    if kind == "text":
        return FREE, None
    if kind == "json_object":
        if asked.get("schema") is None:
            return _ANY_OBJECT, "response_format"
        return {"guided_json": asked["schema"]}, "response_format.schema"
    told = asked.get("json_schema")
    if not isinstance(told, dict) or not isinstance(told.get("schema"), dict):
        raise RequestError("response_format needs an object json_schema with an object schema")
    return {"guided_json": told["schema"]}, "response_format.json_schema"


def _structured_outputs(value: Any) -> _Form:
    if not isinstance(value, dict):
        raise RequestError(f"structured_outputs must be an object, got {shown(value)}")
    given = {key: part for key, part in value.items() if part is not None and part is not False}
    for key in given:
        if key not in _NAMES and key != "json_object":
            raise RequestError(f"structured_outputs.{key} is not supported; it must have one of {', '.join(_NAMES)}")
    if len(given) != 1:
        raise RequestError(f"structured_outputs must have one of {', '.join(_NAMES)}, got {shown(sorted(given))}")
    [(key, part)] = given.items()
    return _ANY_OBJECT if key == "json_object" else {_NAMES[key]: part}, f"structured_outputs.{key}"


FORMS: dict[str, Callable[[Any], _Form]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
}


def asked_form(record: dict[str, Any]) -> _Form:
    """Return the parameters for a record's form, and the record's name for it; {} and None if it has no form.

    Raises:
        RequestError: if a form is wrong or empty, or two keys give one.
    """
    given = [key for key in FORMS if record.get(key) not in (None, "", {})]
    given += [name for name in GUIDES if record.get(name) is not None]
    if len(given) > 1:
        raise RequestError(f"both {given[0]} and {given[1]} are given; give one of them")
    if not given:
        return {}, None
    [key] = given
    asked, called = FORMS[key](record[key]) if key in FORMS else ({key: record[key]}, key)
    if asked.get("guided_choice") == []:
        raise RequestError(f"{called} must have a text to choose, got []")
    return asked, called
