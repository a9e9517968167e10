"""What a text must be, in the words of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import error, one, write

from detgen import SamplingParams
from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.prompts import open_prompts

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"guided_json": SCHEMA}, {"guided_json": TEXT}),
        ({"guided_json": TEXT}, {"guided_json": TEXT}),
        ({"response_format": {"type": "json_object"}}, {"guided_json": '{"type": "object"}'}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"guided_json": TEXT}),
        (
            {"response_format": {"type": "json_object", "schema": None, "x": None}},
            {"guided_json": '{"type": "object"}'},
        ),
        ({"response_format": "json_object"}, {"guided_json": '{"type": "object"}'}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"guided_json": TEXT},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": None}, {}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"guided_json": TEXT}),
        ({"structured_outputs": {"json": TEXT}}, {"guided_json": TEXT}),
        ({"structured_outputs": {"json_object": True}}, {"guided_json": '{"type": "object"}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"guided_regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": "start: x"}}, {"guided_grammar": "start: x"}),
        ({"guided_regex": "[a]"}, {"guided_regex": "[a]"}),
    ],
)
def test_forms(tmp_path: Path, keys: dict[str, Any], asked: dict[str, Any]) -> None:
    """Each asks for the same as a parameter does, and is no metadata; in the batch API's form as well."""
    item = one(tmp_path, json.dumps({"prompt": "a", **keys}))
    assert isinstance(item, Request), item
    assert {name: value for name, value in item.params if name.startswith("guided_") and value} == asked
    assert not item.metadata
    body = {"model": "m", "prompt": "a", **keys}
    other = one(tmp_path, json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}))
    assert isinstance(other, Request), other
    assert other.params == item.params


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format must have a type text, json_object or json_schema"),
        ({"response_format": 3}, "response_format must have a type text, json_object or json_schema, got 3"),
        (
            {"response_format": {"type": "json_object", "strict": True}},
            "response_format.strict is not supported with the type json_object; leave it out",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format needs an object json_schema with an object"),
        ({"structured_outputs": "a"}, "structured_outputs must be an object, got 'a'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs must have one of json, regex,"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is not supported"),
        ({"guided_choice": []}, "guided_choice must have a text to choose, got []"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice must have a text to choose, got []"),
        ({"guided_json": {}, "guided_regex": "a"}, "both guided_json and guided_regex are given; give one of them"),
        (
            {"guided_json": {}, "response_format": "json_object"},
            "both response_format and guided_json are given; give one of them",
        ),
        ({"guided_json": [1]}, "guided_json must be a JSON schema, an object or its text, got [1]"),
        ({"guided_json": "{"}, "guided_json is not JSON: Expecting property name"),
        ({"guided_json": '"x"'}, "guided_json must be a JSON schema, an object or its text, got 'x'"),
        ({"guided_regex": ""}, "guided_regex must be a regular expression, got ''"),
        ({"guided_regex": "a" * 1_000_001}, "guided_regex must be at most 1000000 characters, got 1000001"),
        ({"guided_json": {"title": "a" * 1_000_001}}, "guided_json must be at most 1000000 characters, got 1000014"),
        (
            {"guided_choice": ["a" * 500_001, "b" * 500_000]},
            "guided_choice must have at most 1000000 characters in all",
        ),
        ({"structured_outputs": {"json": {}, "_backend": "x"}}, "structured_outputs._backend is not supported"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json must be a JSON schema, an object or its text"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON: Expecting property name"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex must be a regular expression, got ''"),
        (
            {"structured_outputs": {"choice": ["a" * 1_000_001]}},
            "structured_outputs.choice must have at most 1000000 characters in all",
        ),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema must be a JSON schema, an"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "a" * 1_000_001}}}},
            "response_format.json_schema must be at most 1000000 characters",
        ),
        ({"structured_outputs": {"regex": "a"}, "temperature": -1}, "temperature must be a number from 0 to 10000"),
        ({"guided_choice": [""]}, "guided_choice must be a non-empty string or a list of them, got ['']"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not supported: detgen has structured"),
    ],
)
def test_wrong_forms(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    assert error(tmp_path, json.dumps({"prompt": "a", **keys})).startswith(f"p.jsonl:1: {reason}")


@pytest.mark.parametrize(
    ("keys", "called"),
    [
        ({}, "--regex"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"response_format": "text"}, None),
    ],
)
def test_what_errors_call_a_form(tmp_path: Path, keys: dict[str, Any], called: str | None) -> None:
    """The key of the line or the option of the run, by which it was asked for."""
    path = write(tmp_path, "p.jsonl", json.dumps({"prompt": "a", **keys}))
    [item] = open_prompts(str(path)).read(SamplingParams(guided_regex="a+"))
    assert isinstance(item, Request)
    assert item.form_key == called


def test_a_form_that_no_option_asks_for_is_called_by_its_parameter(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "a"}')
    [item] = open_prompts(str(path)).read(SamplingParams(guided_grammar="start: x"))
    assert isinstance(item, Request)
    assert item.form_key == "guided_grammar"


def test_a_line_replaces_the_default_of_the_run(tmp_path: Path) -> None:
    """One form takes the place of another, and a line that asks for free text has it."""
    lines = [{}, {"guided_json": SCHEMA}, {"response_format": {"type": "text"}}, {"temperature": 1}]
    path = write(tmp_path, "p.jsonl", "\n".join(json.dumps({"prompt": "a", **line}) for line in lines))
    items = list(open_prompts(str(path)).read(SamplingParams(guided_regex="a+")))
    found = [(item.params.guided_regex, item.params.guided_json) for item in items if isinstance(item, Request)]
    assert found == [("a+", None), (None, TEXT), (None, None), ("a+", None)]


def test_a_call_that_a_line_asks_for_takes_the_place_of_the_form_of_the_run(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f"}}]}
    lines = [{"tool_choice": "required"}, {"tool_choice": "auto"}, {"tool_choice": "required", "guided_regex": "b"}]
    path = write(tmp_path, "p.jsonl", "\n".join(json.dumps({**chat, **line}) for line in lines))
    items = list(open_prompts(str(path)).read(SamplingParams(guided_regex="a+")))
    assert [item.params.guided_regex for item in items if isinstance(item, Request)] == [None, "a+", "b"]


def test_columns(tmp_path: Path) -> None:
    """A table's cells are texts; a regular expression that begins with a bracket is no list."""
    path = write(
        tmp_path,
        "p.csv",
        'prompt,guided_regex,guided_json,guided_choice\na,[a],,\nb,,"{""type"": ""null""}",\nc,,,"[""x""]"\n',
    )
    items = [item for item in open_prompts(str(path)).read(SamplingParams()) if isinstance(item, Request)]
    assert [item.params.guided_regex for item in items] == ["[a]", None, None]
    assert [item.params.guided_json for item in items] == [None, '{"type": "null"}', None]
    assert [item.params.guided_choice for item in items] == [(), (), ("x",)]


def test_two_forms_are_one_too_many() -> None:
    with pytest.raises(RequestError, match="both guided_regex and guided_choice are given"):
        SamplingParams(guided_regex="a", guided_choice="b")
    assert SamplingParams(guided_regex="a").with_(guided_choice="b") == SamplingParams(guided_choice="b")
