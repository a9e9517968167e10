"""Requests in the form of the OpenAI batch API: what they ask for, and lines that cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import examples
from helpers.reading import DEFAULTS, error, json_values, one, read, write
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.request import Request
from detgen.params import SamplingParams
from detgen.prompts import BadLine, open_prompts
from detgen.prompts.batch import is_batch

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": CHATS, "body": {"messages": MESSAGES, **body}}


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x", **body}}


def request(folder: Path, line: dict[str, Any]) -> Request:
    item = one(folder, json.dumps(line))
    assert isinstance(item, Request), item
    return item


def test_a_chat(tmp_path: Path) -> None:
    body = {
        "model": "m", "temperature": 0, "top_p": 0.9, "max_completion_tokens": 9, "n": 2, "stop": ["x"], "seed": 3,
        "logprobs": True, "top_logprobs": 4, "frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"7": 2},
        "user": "u", "metadata": {"k": "v"}, "stream": False, "response_format": {"type": "text"}, "tools": [],
    }  # fmt: skip
    assert request(tmp_path, chat(**body)) == Request(
        index=0,
        id="a",
        messages=MESSAGES,
        params=SamplingParams(
            max_tokens=9, temperature=0, top_p=0.9, n=2, stop=("x",), seed=3, logprobs=4,
            frequency_penalty=1, presence_penalty=-1, logit_bias=((7, 2.0),),
        ),
        metadata={"model": "m", "user": "u", "stream": False, "k": "v"},
        line=1,
    )  # fmt: skip


def test_a_completion_with_what_vllm_adds(tmp_path: Path) -> None:
    body = {
        "max_tokens": 9, "logprobs": 2, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [4],
    }  # fmt: skip
    expected = SamplingParams(
        max_tokens=9, temperature=0.5, stop=("END",), logprobs=2, top_k=5, min_p=0.1, repetition_penalty=1.5,
        min_tokens=2, ignore_eos=True, stop_token_ids=(4,),
    )  # fmt: skip
    found = request(tmp_path, completion(**body))
    assert (found.prompt, found.params, found.metadata) == ("x", expected, {})
    assert request(tmp_path, completion(top_k=-1)).params == DEFAULTS


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [("x", "x", None), (["x"], "x", None), ([3, 4], None, (3, 4)), ([[3, 4]], None, (3, 4))],
)
def test_a_prompt_in_each_form(tmp_path: Path, prompt: Any, text: str | None, tokens: Any) -> None:
    found = request(tmp_path, completion(prompt=prompt))
    assert (found.prompt, found.token_ids) == (text, tokens)


def test_null_means_the_default_and_false_turns_logprobs_off(tmp_path: Path) -> None:
    lines = [{**chat(logprobs=wanted), "custom_id": str(wanted)} for wanted in (None, True, False)]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    source = open_prompts(str(path))
    source.inspect()
    items = source.read(SamplingParams(logprobs=5))
    assert [item.params.logprobs for item in items if isinstance(item, Request)] == [5, 0, None]


def test_the_version_may_be_missing_in_the_url(tmp_path: Path) -> None:
    line = chat() | {"url": "/chat/completions"}
    assert request(tmp_path, line) == request(tmp_path, chat())


def test_other_keys_of_the_line_are_metadata(tmp_path: Path) -> None:
    assert request(tmp_path, chat(model="m") | {"split": "test"}).metadata == {"split": "test", "model": "m"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**chat(), "custom_id": 5}, "custom_id must be a string, got a number"),
        ({**chat(), "custom_id": None}, "custom_id is missing; a batch request has custom_id, method, url and body"),
        ({**chat(), "method": None}, "method is missing; a batch request has"),
        ({**chat(), "method": "GET"}, "method must be POST, got 'GET'"),
        ({**chat(), "url": 5}, "url must be a string, got a number"),
        ({**chat(), "url": "/v1/embeddings"}, f"url must be {CHATS} or {COMPLETIONS}, got '/v1/embeddings'"),
        ({**chat(), "url": "https://a.b/v1/completions"}, f"url must be {CHATS} or {COMPLETIONS}, got 'https"),
        ({"custom_id": "a", "method": "POST", "url": CHATS}, "body is missing; a batch request has"),
        ({**chat(), "body": "x"}, "body must be an object, got a string"),
        ({**chat(), "body": {}}, f"body has no messages, which {CHATS} takes"),
        ({**completion(), "body": {}}, f"body has no prompt, which {COMPLETIONS} takes"),
        (chat(prompt="x"), f"body has both messages and prompt; {CHATS} takes messages alone"),
        (
            {**chat(), "url": COMPLETIONS},
            f"body has messages, but {COMPLETIONS} takes prompt; send messages to {CHATS}",
        ),
        ({**completion(), "url": CHATS}, f"body has prompt, but {CHATS} takes messages; send prompt to {COMPLETIONS}"),
        ({**chat(), "temperature": 1}, "temperature stands beside body; put it into body, or leave it out"),
        ({**chat(), "prompt": "x"}, "prompt stands beside body; put it into body, or leave it out"),
        ({**chat(user="a"), "user": "b"}, "'user' is given beside body and, with another value, inside it; keep one"),
        (chat(id="b"), "body has id, which a batch request does not have; give custom_id"),
        (completion(prompt_token_ids=[3]), "body has prompt_token_ids, which a batch request does not have"),
        (chat(model=5), "model must be a string, got a number"),
        (completion(prompt=["x", "y"]), "prompt is a list of 2 prompts; give each of them a line of its own"),
        (completion(prompt=[[1], [2]]), "prompt is a list of 2 prompts; give each of them a line of its own"),
        (completion(prompt=[]), "prompt is empty"),
        (completion(prompt={}), "prompt must be a string, got an object"),
        (chat(logprobs=3), "logprobs of a chat must be true or false, got a number; top_logprobs is the number"),
        (chat(top_logprobs=3), "top_logprobs needs logprobs, which must be true"),
        (chat(logprobs=True, top_logprobs=True), "top_logprobs must be a whole number from 0 to 100, got True"),
        (completion(logprobs=True), "logprobs must be a whole number from 0 to 100, got True"),
        (completion(top_logprobs=3), "top_logprobs is called logprobs here"),
        (chat(stream=True), "stream is not supported: results are written to a file; leave it out"),
        (chat(tool_choice="required"), "tool_choice needs tools that are functions with a name"),
        (chat(response_format={"type": "grammar"}), "response_format must have a type text, json_object"),
        (chat(modalities=["text", "audio"]), "modalities is not supported: detgen writes only text"),
        (chat(audio={"voice": "v"}), "audio is not supported: detgen writes only text"),
        (completion(suffix="s"), "suffix is not supported"),
        (completion(echo=True), "echo is not supported"),
        (completion(best_of=2), "best_of is not supported"),
        (chat(temperature=-1), "temperature must be a number from 0 to 10000, got -1"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type must be"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_run_says_why(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    item = one(tmp_path, json.dumps(line))
    assert isinstance(item, BadLine)
    assert item.error.startswith(f"p.jsonl:1: {reason}")
    assert item.id == ("a" if line["custom_id"] == "a" else 1)


def test_an_empty_id_is_an_id(tmp_path: Path) -> None:
    items = read(write(tmp_path, "p.jsonl", "\n".join(json.dumps({**chat(n=n), "custom_id": ""}) for n in (0, 1))))
    assert [item.id for item in items] == ["", ""]
    assert [item.error[:45] for item in items if isinstance(item, BadLine)] == [
        "p.jsonl:1: n must be a whole number of at lea",
        "p.jsonl:2: custom_id '' is also that of line ",
    ]


def test_broken_lines_and_plain_lines_may_stand_beside_requests(tmp_path: Path) -> None:
    lines = [json.dumps(chat()), '{"custom_id": "b", "method"', '{"prompt": "x"}', json.dumps(completion(stop=None))]
    items = read(write(tmp_path, "p.jsonl", "\n".join(lines[:3])))
    assert [(type(item).__name__, item.id) for item in items] == [("Request", "a"), ("BadLine", "2"), ("Request", "3")]
    assert error(tmp_path, lines[1]).startswith("p.jsonl:1: not valid JSON: ")


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "x", "custom_id": "a"},
        {"prompt": "x", "url": "u", "body": "text", "method": "by hand"},
        {"messages": MESSAGES, "url": "u", "body": {"a": 1}},
        {"url": "u", "body": "text"},
        {"custom_id": "a"},
    ],
)
def test_names_of_the_form_may_be_metadata(line: dict[str, Any]) -> None:
    assert not is_batch(line)
    assert is_batch(chat())


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_an_id_that_comes_again_is_an_error_with_the_first_line(tmp_path: Path, name: str) -> None:
    ids = ["a", "b", "a", "c", "b", "a"]
    texts = [json.dumps({**chat(), "custom_id": id}) for id in ids]
    texts[4] = texts[4].replace('"custom_id"', '"\\u0063ustom_id"')
    data = "\n".join(texts) if name == "p.jsonl" else f"[{','.join(texts)}]"
    items = read(write(tmp_path, name, data))
    assert [item.id for item in items] == ids
    assert {item.line: item.error for item in items if isinstance(item, BadLine)} == {
        3: f"{name}:3: custom_id 'a' is also that of line 1; a batch may have each only once",
        5: f"{name}:5: custom_id 'b' is also that of line 2; a batch may have each only once",
        6: f"{name}:6: custom_id 'a' is also that of line 1; a batch may have each only once",
    }
    assert not any(isinstance(item, BadLine) for item in read(tmp_path / name, limit=2))


def test_ids_of_plain_lines_may_come_again(tmp_path: Path) -> None:
    lines = [{**chat(), "custom_id": "a"}, {"prompt": "x", "id": "a"}, {"prompt": "x", "custom_id": "a"}]
    items = read(write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines))))
    assert all(isinstance(item, Request) for item in items)


def heard(path: Path, model: str | None, **options: Any) -> list[str]:
    source = open_prompts(str(path))
    source.inspect()
    said: list[str] = []
    list(source.read(SamplingParams(), say=said.append, model=model, **options))
    return said


def test_another_model_is_told_of_once(tmp_path: Path) -> None:
    lines = [{**chat(model=name), "custom_id": f"{n}"} for n, name in enumerate(["small", "large", "other"])]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    assert heard(path, "models/small") == [
        "p.jsonl:2 asks for the model large; --target decides, and all lines run on models/small"
    ]
    assert heard(path, "no") == ["p.jsonl:1 asks for the model small; --target decides, and all lines run on no"]
    assert heard(path, None) == []
    assert heard(write(tmp_path, "q.jsonl", '{"prompt": "a", "model": "large"}'), "small") == []


def test_a_typing_error_in_a_body_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", json.dumps(chat(temprature=1)))
    assert [line[:57] for line in heard(path, None)] == [
        "1 line has a key that looks like a typing error and changes n"[:57]
    ]


def test_a_seed_in_a_body_counts_beside_seed_per_line(tmp_path: Path) -> None:
    lines = [{**chat(seed=5), "custom_id": "a"}, {**chat(), "custom_id": "b"}, {"prompt": "x", "id": "b"}]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    source = open_prompts(str(path))
    source.inspect()
    seeds = [item.params.seed for item in source.read(DEFAULTS, seed_per_line=True) if isinstance(item, Request)]
    assert seeds[0] == 5
    assert seeds[1] == seeds[2] != 0


known = st.sampled_from(["messages", "prompt", "model", "logprobs", "top_logprobs", "top_k", "n", "stop", "seed", "id"])
bodies = st.dictionaries(known, json_values) | json_values
parts = {"custom_id": json_values, "method": st.just("POST") | json_values, "url": st.just(CHATS), "body": bodies}
forms = st.fixed_dictionaries({}, optional=parts)


@given(st.lists(forms, min_size=1))
@examples(60)
def test_no_request_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]) -> None:
    path = write(tmp_path_factory.mktemp("any"), "p.jsonl", "\n".join(map(json.dumps, lines)))
    items = read(path)
    assert [item.index for item in items] == list(range(len(lines)))
    assert read(path) == items
