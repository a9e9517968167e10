"""The lines of the output files: their keys and their order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.completions import completion, records, request
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Completion, Request, SamplingParams, Thought, TokenLogprobs, TokenRecord
from detgen.engine.score_requests import ScoreRequest
from detgen.outputs.lines import (
    acceptance_lines,
    bad_line,
    content_digest,
    dump,
    output_line,
    request_digest,
)
from detgen.prompts import BadLine


def test_an_output_line_has_its_keys_in_order() -> None:
    req = replace(request(4, metadata={"b": 1, "a": "é"}), params=SamplingParams(seed=9, logprobs=2))
    logprobs = (TokenLogprobs(-0.25, ((5, -0.25), (6, -2.0))), TokenLogprobs(-1.5, ((8, -0.5), (7, -1.5))))
    line = output_line(Completion(req, 2, "ein „Text“\n", (5, 7), "stop", 3, logprobs, ()))
    assert line == (
        '{"id":5,"index":4,"sample":2,"text":"ein „Text“\\n","token_ids":[5,7],"finish_reason":"stop",'
        '"prompt_tokens":3,"completion_tokens":2,"seed":9,'
        '"logprobs":[{"token":5,"logprob":-0.25,"top":[[5,-0.25],[6,-2.0]]},'
        '{"token":7,"logprob":-1.5,"top":[[8,-0.5],[7,-1.5]]}],"metadata":{"b":1,"a":"é"}}\n'
    )


def test_an_output_line_leaves_out_what_was_not_asked_for() -> None:
    keys = ["id", "index", "sample", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "seed"]
    assert list(json.loads(output_line(completion(request(0))))) == keys


def test_an_output_line_has_the_thoughts_of_a_model_that_thinks() -> None:
    """The first token's position and the text of each, after the seed; an empty list if it thought nothing."""
    thoughts = (Thought(4, (7, 8), " heads"), Thought(12, (9,), "\u00e9"))
    line = output_line(replace(completion(request(0)), thoughts=thoughts))
    assert line.endswith(',"seed":0,"thoughts":[[4," heads"],[12,"\u00e9"]]}\n')
    assert json.loads(output_line(replace(completion(request(0)), thoughts=())))["thoughts"] == []


def test_the_lines_of_errors() -> None:
    failed = Completion(request(3, metadata={"k": 1}), error="too long")
    assert output_line(failed) == '{"id":4,"index":3,"sample":0,"error":"too long","metadata":{"k":1}}\n'
    assert bad_line(BadLine(0, 1, "x", "p:1: bad")) == '{"id":"x","index":0,"sample":0,"error":"p:1: bad"}\n'


def test_an_acceptance_line_has_its_keys_in_order() -> None:
    record = TokenRecord(1, 0, 8, "ngram", 9, "corrected", -0.125, 0.5)
    lines = acceptance_lines(Completion(request(2), 1, "", (8,), "stop", 1, None, (record, records(0)[0])))
    assert lines == (
        '{"id":3,"index":2,"sample":1,"position":1,"round":0,"token":8,"drafter":"ngram","drafted":9,'
        '"status":"corrected","logprob":-0.125,"margin":0.5}\n'
        '{"id":3,"index":2,"sample":1,"position":0,"round":0,"token":null,"drafter":"model","drafted":9,'
        '"status":"rolled_back","logprob":null,"margin":null}\n'
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    )
)
def test_whatever_is_dumped_is_json_in_utf_8(value: Any) -> None:
    def expected(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: expected(part) for key, part in value.items()}
        return [expected(part) for part in value] if isinstance(value, list) else value

    line = dump(value).encode()
    assert b"\n" not in line
    # a lead half beside a trail half cannot be told from the character that both spell
    assert json.dumps(json.loads(line)) == json.dumps(json.loads(json.dumps(expected(value))))


@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"prompt": "other"},
        {"prompt": None, "messages": [{"role": "user", "content": "prompt 0"}]},
        {"params": SamplingParams(seed=1)},
        {"metadata": {"a": 1}},
        {"tools": [{}]},
        {"chat_template_kwargs": {"a": 1}},
        {"continue_final_message": True},
        {"echo": True},
    ],
)
def test_the_digest_covers_whatever_decides_a_line(change: dict[str, Any]) -> None:
    assert request_digest(replace(request(0), **change)) != request_digest(request(0))
    assert request_digest(replace(request(0), index=99, line=99)) == request_digest(request(0))


def test_an_output_line_may_repeat_its_prompt() -> None:
    for asked in ({"prompt": "é"}, {"messages": [{"role": "user", "content": "a"}]}, {"token_ids": (3, 4)}):
        req = replace(request(0), **{"prompt": None, **asked, "echo": True})
        line = json.loads(output_line(completion(req)))
        (name, value), *_ = asked.items()
        assert list(line)[3] == ("prompt_token_ids" if name == "token_ids" else name)
        assert line[list(line)[3]] == (list(value) if isinstance(value, tuple) else value)
        failed = json.loads(output_line(Completion(req, error="too long")))
        assert list(failed) == ["id", "index", "sample", "error"]


def test_the_content_of_a_request_is_what_its_samples_depend_on() -> None:
    """Where it stands, its name, `n` and what is copied to its lines are no part of it; all else is."""
    params = SamplingParams(temperature=1, seed=3)  # type: ignore[arg-type]
    one = Request(0, "a", messages=[{"role": "user", "content": "x"}], params=params, tools=[{"a": 1, "b": 2}])
    alike = [
        replace(one, index=7, id=8, line=9, metadata={"k": 1}, echo=True, only=(0,)),
        replace(one, params=replace(params, n=4, temperature=1.0)),
    ]
    assert {content_digest(each) for each in alike} == {content_digest(one)}
    other = [
        replace(one, messages=None, prompt="x"),
        replace(one, messages=None, token_ids=(1,)),
        replace(one, messages=[{"content": "x", "role": "user"}]),
        replace(one, tools=[{"b": 2, "a": 1}]),
        replace(one, chat_template_kwargs={"enable_thinking": True}),
        replace(one, continue_final_message=True),
        *(replace(one, params=replace(params, **{name: value})) for name, value in OTHER_PARAMS.items()),
    ]
    assert len({content_digest(each) for each in (one, *other)}) == len(other) + 1
    assert set(SamplingParams.__slots__) - set(OTHER_PARAMS) == {"n", "deterministic"}


OTHER_PARAMS: dict[str, Any] = {
    "max_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "seed": 4, "stop": ("x",),
    "logprobs": 0, "min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "repetition_penalty": 2.0,
    "frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": ((1, 1.0),),
}  # fmt: skip


def test_what_is_no_function_of_its_request_has_no_content() -> None:
    assert content_digest(Request(0, 0, prompt="x", params=SamplingParams(deterministic=False))) is None
    assert content_digest(ScoreRequest(0, 0, prompt="x")) is None
