"""The JSON Schema of a line, for editors and other programs, from the declarations in `kinds` and `detgen.params`.

It describes the keys. Which keys exclude or need each other, and which are refused, is checked when lines are read.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts.kinds import CONTENTS, SCORED, BatchLine


def prompt_schema() -> dict[str, Any]:
    """Return the schema of a line of prompts: a text, a chat, token ids, or a request of the OpenAI batch API."""
    parameters = _parameters()
    kinds, parts = _kinds([*CONTENTS.values(), BatchLine])
    for kind in CONTENTS.values():
        parts[kind.__name__]["properties"] |= parameters
    # In a chat of the API, logprobs is true or false instead of a number.
    body = {name: schema for name, schema in parameters.items() if name != "logprobs"}
    parts[BatchLine.__name__]["properties"]["body"]["properties"] = body
    return _schema("A line of prompts for detgen", {"oneOf": kinds}, parts)


def score_schema() -> dict[str, Any]:
    """Return the schema of a line to score: a text, or a prompt with completions."""
    kinds, parts = _kinds([*CONTENTS.values(), *SCORED.values()])
    prompts, (text, *completions) = kinds[: len(CONTENTS)], kinds[len(CONTENTS) :]
    several = {"allOf": [{"oneOf": prompts}, {"oneOf": completions}]}
    return _schema("A line to score for detgen", {"oneOf": [text, several]}, parts)


def _schema(title: str, kinds: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": title, **kinds, "$defs": parts}


def _kinds(types: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return references to the schemas of some types, and all of their schemas by name."""
    references, schemas = TypeAdapter.json_schemas([(t.__name__, "validation", TypeAdapter(t)) for t in types])
    return list(references.values()), schemas["$defs"]


def _parameters() -> dict[str, Any]:
    """Return the schemas of the parameters in a line, under all their names."""
    found: dict[str, Any] = {}
    for name, schema in SamplingParams.model_json_schema()["properties"].items():
        about = {key: schema.pop(key) for key in ("title", "description", "default")}
        if about["default"] == []:  # whatever its spelling in a line
            del about["default"]
        found[name] = {"anyOf": [schema, {"type": "null"}], **about}
        found |= {alias: {**found[name], "description": f"The same as {name}."} for alias in PARAMETERS[name].aliases}
    return found
