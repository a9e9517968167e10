"""The declarations of what a run writes: what the writer writes is a line, anything else is none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.completions import NUMBERED, completion, records, request

from detgen.engine.answer import Answer, ToolCall
from detgen.engine.request import Completion, Thought, TokenLogprobs
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.outputs.lines import acceptance_lines, output_line
from detgen.outputs.records import (
    AcceptanceLine,
    ErrorLine,
    ScoreLine,
    TextLine,
    columns,
    in_order,
    is_acceptance,
    is_line,
    keys_of,
    parse_line,
)

ANSWER = Answer("hm", None, (ToolCall("f", '{"x": 1}'),))


def whole() -> Completion:
    """With everything that a line may have."""
    asked = replace(request(4, metadata={"k": [1]}), echo=True)
    logprobs = (TokenLogprobs(-0.25, ((5, -0.25), (6, -2.0))), TokenLogprobs(float("-inf"), ()))
    return Completion(asked, 2, "text", (5, 7), "stop", 3, logprobs, thoughts=(Thought(0, (1,), "x"),), answer=ANSWER)


def score() -> Score:
    return Score(ScoreRequest(0, "a", prompt="p", completions=("q",), echo=True), 0, (3,), (-1.5,), (False,), 2)


def lines() -> list[str]:
    failed = Completion(request(3, metadata={"k": 1}), error="too long")
    return [output_line(each, NUMBERED) for each in (whole(), completion(request(0)), failed, score())]


@pytest.mark.parametrize("raw", lines())
def test_what_is_written_is_a_line_in_its_declared_order(raw: str) -> None:
    line = parse_line(raw.encode())
    assert line == json.loads(raw)
    kind = ErrorLine if "error" in line else ScoreLine if "is_greedy" in line else TextLine
    declared = list(keys_of(kind))
    assert list(line) == [name for name in declared if name in line]


def test_a_line_with_everything_has_all_keys_but_other_prompts() -> None:
    assert set(keys_of(TextLine)) - set(json.loads(output_line(whole(), NUMBERED))) == {"messages", "prompt_token_ids"}


@pytest.mark.parametrize("raw", lines())
def test_anything_else_is_none(raw: str) -> None:
    line: dict[str, Any] = json.loads(raw)
    assert not is_line({**line, "extra": 1})
    assert not is_line([line])
    optional = {"prompt", "text", "metadata", "thoughts", "logprobs", "completion"}
    for name in line.keys() - optional - {"reasoning_content", "content", "tool_calls"}:
        assert not is_line({key: value for key, value in line.items() if key != name}), name
    for name in line.keys() - {"id", "logprob", "stop_reason", "content"}:
        assert not is_line({**line, name: None}), name
    for name in ("id", "sample", "index"):
        assert not is_line({**line, name: 1.5}), name
    assert parse_line(raw.encode()[:-3]) is None
    assert parse_line(b"\xff" + raw.encode()) is None
    assert parse_line(b"[" * 100_000) is None


def test_half_of_a_surrogate_pair_is_a_string_and_nothing_more() -> None:
    raw = output_line(replace(whole(), text="a \ud83d"), NUMBERED)
    assert parse_line(raw.encode()) is not None
    assert parse_line(raw.replace('"seed":0', '"seed":"\\ud83d"').encode()) is None


def test_a_key_that_is_not_declared_is_not_written() -> None:
    with pytest.raises(KeyError, match="extra"):
        in_order(ErrorLine, {"id": 1, "index": 0, "sample": 0, "error": "e", "extra": 1})


def test_a_line_of_the_acceptance_log_has_the_declared_keys() -> None:
    found = set()
    for raw in acceptance_lines(replace(completion(request(0)), records=records(3))).splitlines():
        assert is_acceptance(raw.encode())
        line = json.loads(raw)
        assert list(line) == [name for name in keys_of(AcceptanceLine) if name in line]
        found |= line.keys()
    assert found == set(keys_of(AcceptanceLine))


@pytest.mark.parametrize("change", [{"id": 1}, {"token": None}, {"margin": None}, {"drafter": 3}, {"logprob": "-1"}])
def test_anything_else_is_no_line_of_the_log(change: dict[str, Any]) -> None:
    line = json.loads(acceptance_lines(completion(request(0))).splitlines()[0])
    assert is_acceptance(json.dumps(line).encode())
    assert not is_acceptance(json.dumps({**line, **change}).encode())


def test_columns_are_declared_keys() -> None:
    assert list(columns())[:3] == ["id", "index", "sample"]
    assert set(columns()) <= {*keys_of(TextLine), *keys_of(ErrorLine)}
