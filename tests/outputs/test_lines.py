"""The lines of the output files: their keys and their order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from helpers.completions import NUMBERED, completion, records, request
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Completion, Request, Status, Thought, TokenLogprobs, TokenRecord
from detgen.engine.score_requests import ScoreRequest
from detgen.outputs.lines import (
    acceptance_lines,
    bad_line,
    content_digest,
    dump,
    log_lines,
    output_line,
    request_digest,
)
from detgen.outputs.records import log_entry
from detgen.params import PARAMETERS, SamplingParams
from detgen.prompts import BadLine


def test_an_output_line_has_its_keys_in_order() -> None:
    req = replace(request(4, metadata={"b": 1, "a": "é"}), params=SamplingParams(seed=9, logprobs=2))
    logprobs = (TokenLogprobs(-0.25, ((5, -0.25), (6, -2.0))), TokenLogprobs(-1.5, ((8, -0.5), (7, -1.5))))
    line = output_line(Completion(req, 2, "ein „Text“\n", (5, 7), "stop", 3, logprobs, ()), NUMBERED)
    assert line == (
        '{"id":5,"index":4,"sample":2,"text":"ein „Text“\\n","token_ids":[5,7],"finish_reason":"stop",'
        '"prompt_tokens":3,"completion_tokens":2,"seed":9,'
        '"logprobs":[{"token":5,"logprob":-0.25,"top":[[5,-0.25,"<5>"],[6,-2.0,"<6>"]],"text":"<5>"},'
        '{"token":7,"logprob":-1.5,"top":[[8,-0.5,"<8>"],[7,-1.5,"<7>"]],"text":"<7>"}],"metadata":{"b":1,"a":"é"},"stop_reason":null}\n'
    )


def test_an_output_line_leaves_out_what_was_not_asked_for() -> None:
    keys = ["id", "index", "sample", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "seed"]
    assert list(json.loads(output_line(completion(request(0)), NUMBERED))) == [*keys, "stop_reason"]


def test_an_output_line_has_the_thoughts_of_a_model_that_thinks() -> None:
    """The first token's position and the text of each, after the seed; an empty list if it thought nothing."""
    thoughts = (Thought(4, (7, 8), " heads"), Thought(12, (9,), "\u00e9"))
    line = output_line(replace(completion(request(0)), thoughts=thoughts), NUMBERED)
    assert line.endswith(',"seed":0,"thoughts":[[4," heads"],[12,"\u00e9"]],"stop_reason":null}\n')
    assert json.loads(output_line(replace(completion(request(0)), thoughts=()), NUMBERED))["thoughts"] == []


def test_the_lines_of_errors() -> None:
    failed = Completion(request(3, metadata={"k": 1}), error="too long")
    assert output_line(failed, NUMBERED) == '{"id":4,"index":3,"sample":0,"error":"too long","metadata":{"k":1}}\n'
    assert bad_line(BadLine(0, 1, "x", "p:1: bad")) == '{"id":"x","index":0,"sample":0,"error":"p:1: bad"}\n'


def test_an_acceptance_line_has_its_keys_in_order() -> None:
    record = TokenRecord(1, 0, 8, "ngram", 9, "corrected", -0.125, 0.5)
    lines = acceptance_lines(Completion(request(2), 1, "", (8,), "stop", 1, None, (record, records(0)[0])))
    assert lines == (
        '{"index":2,"sample":1,"position":1,"round":0,"token":8,"drafter":"ngram","drafted":9,'
        '"status":"corrected","logprob":-0.125,"margin":0.5}\n'
        '{"index":2,"sample":1,"position":0,"round":0,"drafter":"model","drafted":9,"status":"rolled_back"}\n'
    )


_FLOATS = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def _records(draw: st.DrawFn) -> TokenRecord:
    status = draw(st.sampled_from(get_args(Status)))
    token, drafter = draw(st.integers(0, 2**40)), draw(st.sampled_from(["none", "model", "ngram"]))
    drafted = token if status == "accepted" else draw(st.none() | st.integers(0, 9))
    place = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
    if status == "rolled_back":
        return TokenRecord(*place, None, drafter, drafted, status, None, None)
    return TokenRecord(*place, token, drafter, drafted, status, draw(_FLOATS), draw(_FLOATS))


@given(made=st.lists(_records(), max_size=9))
def test_a_line_of_the_log_says_all_of_its_record(made: list[TokenRecord]) -> None:
    raws = log_lines(7, 3, made).splitlines()
    found = [log_entry(json.loads(raw)) for raw in raws]
    assert all({"index": 7, "sample": 3, **record._asdict()} == each for record, each in zip(made, found, strict=True))


def test_a_number_of_the_log_is_as_short_as_its_float32_allows() -> None:
    values = [float(np.float32(value)) for value in (0.1, -1e-7, 16777216, 1 / 3)]
    lines = log_lines(0, 0, [TokenRecord(0, 0, 1, "none", None, "plain", -value, value) for value in values])
    assert [json.loads(line, parse_float=str)["margin"] for line in lines.splitlines()] == [
        *("0.1", "-1e-07", "1.6777216e+07", "0.33333334")
    ]


def test_what_is_no_number_is_left_out_of_the_log() -> None:
    lines = log_lines(0, 0, [TokenRecord(0, 0, 1, "none", None, "plain", -math.inf, math.nan)])
    assert lines == '{"index":0,"sample":0,"position":0,"round":0,"token":1,"status":"plain"}\n'


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


def test_digests_of_texts_stay() -> None:
    """So that runs and caches find what earlier versions generated."""
    one = Request(0, 0, prompt="x")
    assert content_digest(one) == "383835c7df67ff94f7354efc58f23db8"
    assert request_digest(one) == "ddcbf4a62b431f56bf7e0fbfda92cc09"


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
        {"parallel_tool_calls": False},
        {"echo": True},
        {"form_key": "--regex"},
    ],
)
def test_the_digest_covers_whatever_decides_a_line(change: dict[str, Any]) -> None:
    assert request_digest(replace(request(0), **change)) != request_digest(request(0))
    assert request_digest(replace(request(0), index=99, line=99)) == request_digest(request(0))


def test_an_output_line_may_repeat_its_prompt() -> None:
    for asked in ({"prompt": "é"}, {"messages": [{"role": "user", "content": "a"}]}, {"token_ids": (3, 4)}):
        req = replace(request(0), **{"prompt": None, **asked, "echo": True})
        line = json.loads(output_line(completion(req), NUMBERED))
        (name, value), *_ = asked.items()
        assert list(line)[3] == ("prompt_token_ids" if name == "token_ids" else name)
        assert line[list(line)[3]] == (list(value) if isinstance(value, tuple) else value)
        failed = json.loads(output_line(Completion(req, error="too long"), NUMBERED))
        assert list(failed) == ["id", "index", "sample", "error"]


def test_the_content_of_a_request_is_what_its_samples_depend_on() -> None:
    """Where it stands, its name, `n` and what is copied to its lines are no part of it; all else is."""
    params = SamplingParams(temperature=1, seed=3)  # type: ignore[arg-type]
    one = Request(0, "a", messages=[{"role": "user", "content": "x"}], params=params, tools=[{"a": 1, "b": 2}])
    alike = [
        replace(one, index=7, id=8, line=9, metadata={"k": 1}, echo=True, only=(0,), form_key="x"),
        replace(one, params=params.with_(n=4, temperature=1.0)),
    ]
    assert {content_digest(each) for each in alike} == {content_digest(one)}
    other = [
        replace(one, messages=None, prompt="x"),
        replace(one, messages=None, token_ids=(1,)),
        replace(one, messages=[{"content": "x", "role": "user"}]),
        replace(one, tools=[{"b": 2, "a": 1}]),
        replace(one, tool_choice="none"),
        replace(one, chat_template_kwargs={"enable_thinking": True}),
        replace(one, continue_final_message=True),
        replace(one, parallel_tool_calls=False),
        *(replace(one, params=params.with_(**{name: value})) for name, value in OTHER_PARAMS.items()),
    ]
    assert len({content_digest(each) for each in (one, *other)}) == len(other) + 1
    assert PARAMETERS.keys() - set(OTHER_PARAMS) == {"n", "deterministic"}


OTHER_PARAMS: dict[str, Any] = {
    "max_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "seed": 4, "stop": ("x",),
    "logprobs": 0, "min_tokens": 1, "stop_token_ids": (1,), "ignore_eos": True, "repetition_penalty": 2.0,
    "frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": ((1, 1.0),),
    "guided_json": {"type": "null"}, "guided_regex": "a", "guided_choice": "a", "guided_grammar": "start: \"a\"",
}  # fmt: skip


def test_what_is_no_function_of_its_request_has_no_content() -> None:
    assert content_digest(Request(0, 0, prompt="x", params=SamplingParams(deterministic=False))) is None
    assert content_digest(ScoreRequest(0, 0, prompt="x")) is None
