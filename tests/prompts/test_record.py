"""One record: keys that are understood, and lines that cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import examples
from helpers.reading import DEFAULTS, error, json_values, one, read, write
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Request
from detgen.params import SamplingParams
from detgen.prompts import BadLine


def test_all_keys_are_understood(tmp_path: Path) -> None:
    line = {
        "id": "a", "prompt": "hi", "max_tokens": 3, "temperature": 1, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 5,
        "n": 2, "stop": ["x", "y"], "deterministic": False, "logprobs": 3, "task": "t", "tags": [1, {"a": None}],
        "min_tokens": 2, "stop_token_ids": [7, 5], "ignore_eos": True, "repetition_penalty": 1.5,
        "frequency_penalty": 1, "presence_penalty": -0.5, "logit_bias": {"9": -100, "4": 2.5},
    }  # fmt: skip
    assert one(tmp_path, json.dumps(line)) == Request(
        index=0,
        id="a",
        prompt="hi",
        params=SamplingParams(
            max_tokens=3,
            temperature=1,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            seed=5,
            n=2,
            stop=("x", "y"),
            logprobs=3,
            deterministic=False,
            min_tokens=2,
            stop_token_ids=(7, 5),
            ignore_eos=True,
            repetition_penalty=1.5,
            frequency_penalty=1,
            presence_penalty=-0.5,
            logit_bias=((4, 2.5), (9, -100.0)),
        ),
        metadata={"task": "t", "tags": [1, {"a": None}]},
        line=1,
    )


def test_null_and_absence_mean_the_default(tmp_path: Path) -> None:
    keys = ("id", "messages", "stop", "max_tokens", "temperature", "seed", "n", "deterministic", "logprobs")
    expected = Request(index=0, id=1, prompt="hi", params=DEFAULTS, line=1)
    assert one(tmp_path, json.dumps({"prompt": "hi"} | dict.fromkeys(keys))) == expected
    assert one(tmp_path, '{"prompt": "hi"}') == expected


def test_stop_may_be_one_string_or_none_at_all(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.jsonl", '{"prompt": "a", "stop": "x"}\n{"prompt": "a", "stop": []}'))
    assert [item.params.stop for item in items if isinstance(item, Request)] == [("x",), ()]


def test_chats_are_carried_whole(tmp_path: Path) -> None:
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": role, "name": "n"} for role in roles]
    item = one(tmp_path, json.dumps({"messages": messages}))
    assert isinstance(item, Request)
    assert item.prompt is None
    assert item.messages == messages


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "seed": 1, "x": 1, "seed": 1}', "seed"),
        ('{"prompt": "a", "se\\u0065d": 1, "seed": 1}', "seed"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"prompt": "a", "metadata": {"x": 1, "x": 2}}', "x"),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": 1, "n": 2}}',
            "n",
        ),
    ],
)
def test_a_key_is_given_once(tmp_path: Path, line: str, key: str) -> None:
    """Which one is meant is not guessed."""
    assert error(tmp_path, line) == f"p.jsonl:1: {key!r} is given twice; keep one of them"


def test_a_line_with_a_key_given_twice_keeps_its_id_and_its_metadata(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "id": "first", "team": 3, "seed": 1, "seed": 1}',
        '{"prompt": "b", "seed": 1, "seed": 1} and more',
    ]
    first, second = read(write(tmp_path, "p.jsonl", "\n".join(lines)))
    assert isinstance(first, BadLine)
    assert isinstance(second, BadLine)
    assert (first.id, first.metadata) == ("first", {"team": 3})
    assert second.id == "2"
    assert "not valid JSON" in second.error


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a" "id": 1}', "not valid JSON: Expecting ',' delimiter at column 16"),
        ('{"prompt": "a"', "not valid JSON: Expecting ',' delimiter at column 15"),
        ('{"prompt": "a}', "not valid JSON: Unterminated string starting at column 12"),
        ('{"prompt": "a"} {}', "not valid JSON: Extra data at column 17"),
        ('{"prompt": "a", "x": NaN}', "not valid JSON: NaN is not a JSON value"),
        ('{"prompt": "a", "x": -Infinity}', "not valid JSON: -Infinity is not a JSON value"),
        ('{"prompt": "a", "x": 1e999}', "not valid JSON: the number 1e999 is out of range"),
        ('{"prompt": "a", "x": ' + "1" * 5000 + "}", "not valid JSON: a number of too many digits"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"prompt": "a", "x": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 13"),
        ('["a"]', 'a prompt must be an object such as {"prompt": "..."}, got a list'),
        ('"a"', 'a prompt must be an object such as {"prompt": "..."}, got a string'),
        ("null", 'a prompt must be an object such as {"prompt": "..."}, got null'),
        ("{}", "neither prompt nor messages is given"),
        ('{"prompt": null}', "neither prompt nor messages is given"),
        ('{"prompt": "a", "messages": []}', "both prompt and messages are given; give one of them"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 3}', "prompt must be a string, got a number"),
        ('{"prompt": "a\\ud800b"}', r"prompt holds half a character, \ud800 at position 1"),
        ('{"prompt": "a", "stop": "\\udc00"}', r"stop holds half a character, \udc00 at position 0"),
        ('{"prompt": "a", "id": 1.5}', "id must be a string or a whole number, got a number"),
        ('{"prompt": "a", "id": true}', "id must be a string or a whole number, got true or false"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number of at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens must be a whole number of at least 1, got '9'"),
        ('{"prompt": "a", "temperature": -1}', "temperature must be a number from 0 to 10000, got -1"),
        ('{"prompt": "a", "stop": 5}', "stop must be a non-empty string or a list of them, got 5"),
        ('{"prompt": "a", "stop": ["x", ""]}', "stop must be a non-empty string or a list of them, got ['x', '']"),
        ('{"prompt": "a", "deterministic": 1}', "deterministic must be true or false, got 1"),
        ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos must be true or false, got 1"),
        ('{"prompt": "a", "n": 1000001}', "n must be at most 1000000, got 1000001"),
        ('{"prompt": "a", "max_tokens": 2147483648}', "max_tokens must be at most 2147483647, got 2147483648"),
        ('{"prompt": "a", "top_k": 2147483648}', "top_k must be at most 2147483647, got 2147483648"),
        ('{"prompt": "a", "min_tokens": -1}', "min_tokens must be a whole number of at least 0, got -1"),
        ('{"prompt": "a", "min_tokens": 8}', "min_tokens must be at most max_tokens (7), got 8"),
        ('{"prompt": "a", "stop": ' + json.dumps(["x"] * 1001) + "}", "stop must be at most 1000 strings, got 1001"),
        ('{"prompt": "a", "stop_token_ids": 5}', "stop_token_ids must be a list of token ids, got 5"),
        ('{"prompt": "a", "stop_token_ids": [1.5]}', "stop_token_ids must be a list of token ids, got [1.5]"),
        ('{"prompt": "a", "stop_token_ids": [true]}', "stop_token_ids must be a list of token ids, got [True]"),
        (
            '{"prompt": "a", "stop_token_ids": ' + json.dumps([1] * 10001) + "}",
            "stop_token_ids must be at most 10000 ids, got 10001",
        ),
        ('{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty must be a number from 0.01 to 100, got 0"),
        ('{"prompt": "a", "frequency_penalty": 2.5}', "frequency_penalty must be a number from -2 to 2, got 2.5"),
        ('{"prompt": "a", "presence_penalty": "1"}', "presence_penalty must be a number from -2 to 2, got '1'"),
        (
            '{"prompt": "a", "logit_bias": 5}',
            "logit_bias must be an object from token ids to numbers from -100 to 100, got 5",
        ),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias must have token ids as keys, got 'x'"),
        ('{"prompt": "a", "logit_bias": {"-1": 1}}', "logit_bias must have token ids as keys, got '-1'"),
        (
            '{"prompt": "a", "logit_bias": {"7": 101}}',
            "logit_bias of token 7 must be a number from -100 to 100, got 101",
        ),
        ('{"prompt": "a", "logit_bias": {"7": 1, "07": 2}}', "logit_bias names token 7 twice"),
        (
            '{"prompt": "a", "logit_bias": ' + json.dumps({str(i): 1 for i in range(300_001)}) + "}",
            "logit_bias must be at most 300000 ids, got 300001",
        ),
        ('{"messages": {}}', "messages must be a list, got an object"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": ["hi"]}', "messages[0] must be an object with role and content, got a string"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}]}',
            "messages[1].role must be one of system, developer, user, assistant, tool, got 'robot'",
        ),
        (
            '{"messages": [{"content": "a"}]}',
            "messages[0].role must be one of system, developer, user, assistant, tool, got nothing",
        ),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "messages[0].role must be one of"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content must be a string, got null"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"messages[0].content holds half a character, \ud83d at position 0",
        ),
    ],
)
def test_a_line_that_cannot_run_says_where_and_why(tmp_path: Path, line: str | bytes, reason: str) -> None:
    assert error(tmp_path, line).startswith(f"p.jsonl:1: {reason}")


@pytest.mark.parametrize("key", ["max_tokens", "temperature", "stop", "max_new_tokens", "metadata", "tools", "best_of"])
def test_a_value_as_deep_as_python_goes_is_an_error(tmp_path: Path, key: str) -> None:
    """Some depths can be read but not shown in a message; and which they are depends on the caller's depth."""
    deep = ["[" * depth + "]" * depth for depth in range(850, 1050)]
    lines = [f'{{"prompt": "a", "{key}": {value}, "max_tokens": {value}}}' for value in deep]
    items = read(write(tmp_path, "p.jsonl", "\n".join(lines)))
    assert [isinstance(item, BadLine) for item in items] == [True] * 200

    def deeper(frames: int) -> list[Request | BadLine]:
        return deeper(frames - 1) if frames else read(tmp_path / "p.jsonl")

    assert deeper(100) == items
    nested = [f"x{'[' * 600}", '\\"' + "[" * 600]
    texts = read(write(tmp_path, "q.jsonl", "\n".join(f'{{"prompt": "{text}"}}' for text in nested)))
    assert [item.prompt for item in texts if isinstance(item, Request)] == [f"x{'[' * 600}", '"' + "[" * 600]


def test_a_bad_line_keeps_its_id_and_metadata(tmp_path: Path) -> None:
    assert one(tmp_path, '{"id": "x", "prompt": 1, "task": "t"}') == BadLine(
        0, 1, "x", "p.jsonl:1: prompt must be a string, got a number", {"task": "t"}
    )


known_keys = st.sampled_from(["id", "prompt", "messages", "stop", "n", "seed", "temperature", "top_k", "logprobs", "x"])


@given(
    st.lists(st.binary(max_size=40) | st.dictionaries(known_keys, json_values).map(lambda d: json.dumps(d).encode()))
)
@examples(50)
def test_no_line_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("any"), "p.jsonl", b"\n".join([b'{"prompt": "a"}', *lines]))
    items = read(path)
    shown = [n for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    assert [item.line for item in items] == shown
    assert [item.index for item in items] == list(range(len(items)))
