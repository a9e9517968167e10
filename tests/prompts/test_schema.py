"""The JSON Schema of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts import BadLine
from detgen.prompts.record import parse_record, parse_score
from detgen.prompts.schema import prompt_schema, score_schema

jsonschema = pytest.importorskip("jsonschema")
SAMPLES = Path(__file__).parents[2] / "sample_prompts"
CHAT = [{"role": "user", "content": "a"}]
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


def fits(schema: dict[str, Any], line: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(line))


def runs(parse: Any, line: dict[str, Any], **options: Any) -> bool:
    found = parse(line, index=0, line=1, defaults=SamplingParams(), number=1, **options)
    return not isinstance(found, BadLine)


def test_it_is_a_schema_of_all_keys() -> None:
    for schema in (prompt_schema(), score_schema()):
        jsonschema.Draft202012Validator.check_schema(schema)
    described = prompt_schema()["$defs"]["TextLine"]["properties"]
    assert {name: described[name]["description"] for name in PARAMETERS} == {
        name: parameter.help for name, parameter in PARAMETERS.items()
    }
    assert described["max_new_tokens"]["anyOf"] == described["max_tokens"]["anyOf"]


def test_all_samples_fit() -> None:
    schema, paths = (
        prompt_schema(),
        set(SAMPLES.glob("*.jsonl")) - {SAMPLES / "mistakes.jsonl", SAMPLES / "scores.jsonl"},
    )
    lines = [json.loads(line) for path in sorted(paths) for line in path.read_text("utf-8").splitlines()]
    assert len(lines) > 20
    assert all(fits(schema, line) for line in lines)
    scores = (SAMPLES / "scores.jsonl").read_text("utf-8").splitlines()
    assert all(fits(score_schema(), json.loads(line)) for line in scores)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a"},
        {"prompt": ""},
        {"prompt": 3},
        {"id": 1},
        {"prompt": "a", "id": 1.5},
        {"prompt": "a", "id": "x", "task": [1]},
        {"prompt": "a", "messages": CHAT},
        {"prompt": None, "messages": CHAT},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": CHAT, "tools": [3]},
        {"messages": CHAT, "continue_final_message": 1},
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": [1, -2]},
        {"prompt_token_ids": []},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "max_new_tokens": "4"},
        {"prompt": "a", "max_new_tokens": 4, "temperature": None},
        {"prompt": "a", "top_p": 0},
        {"prompt": "a", "stop": "x"},
        {"prompt": "a", "stop": ["x", ""]},
        {"prompt": "a", "stop": ""},
        {"prompt": "a", "stop": "x" * 2000},
        {"prompt": "a", "stop": ["x"] * 1001},
        {"prompt": "a", "stop_token_ids": [5]},
        {"prompt": "a", "stop_token_ids": 5},
        {"prompt": "a", "logit_bias": {"5": 2}},
        {"prompt": "a", "logit_bias": {"5": 200}},
        {"prompt": "a", "deterministic": 0},
        BATCH,
        {**BATCH, "method": "GET"},
        {**BATCH, "body": {"prompt": "a", "temperature": -1}},
    ],
    ids=lambda line: json.dumps(line)[:60],
)
def test_what_fits_is_what_is_read(line: dict[str, Any]) -> None:
    assert fits(prompt_schema(), line) == runs(parse_record, line)


@pytest.mark.parametrize(
    "line",
    [
        {"text": "a"},
        {"text": ""},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completions": ["b", "c"]},
        {"prompt": "a", "completions": []},
        {"prompt": "a", "completion": "b", "completions": ["b"]},
        {"messages": CHAT, "completion": "b", "max_tokens": 0},
        {"prompt": "a"},
        {"completion": "b"},
    ],
    ids=json.dumps,
)
def test_what_fits_is_what_is_scored(line: dict[str, Any]) -> None:
    assert fits(score_schema(), line) == runs(parse_score, line, texts=False)
