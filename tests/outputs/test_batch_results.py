"""Results as the OpenAI batch API has them: the types of its own package accept every line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_types import Failure, check
from helpers.completions import completion, request
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from detgen.engine.pieces import Pieces, pieces_of
from detgen.engine.request import NOT_FINITE, Completion, Request, TokenLogprobs
from detgen.errors import OutputError
from detgen.outputs.batch_results import result_lines
from detgen.outputs.finished import beside
from detgen.outputs.lines import bad_line, output_line
from detgen.params import SamplingParams
from detgen.prompts import BadLine

PROFILE = {"target": {"name": "models/small", "digest": "d", "quant": "none"}, "dtype": "float32", "arithmetic": "x"}


def lines_of(completions: list[Completion | BadLine]) -> list[dict[str, Any]]:
    texts = [output_line(c) if isinstance(c, Completion) else bad_line(c) for c in completions]
    return [json.loads(text) for text in texts]


def results(items: list[Request | BadLine], completions: list[Completion | BadLine], load: Any = None) -> list[bytes]:
    pieces = Pieces(load) if load else pieces_of(None)
    return list(result_lines(PROFILE, items, lines_of(completions), pieces))


def unused() -> Any:
    raise AssertionError("no tokenizer should be loaded")


def chat(index: int, **fields: Any) -> Request:
    return replace(request(index, **fields), prompt=None, messages=[{"role": "user", "content": "hi"}])


def test_a_text_and_a_chat_with_two_samples() -> None:
    text, asked = request(0), chat(1, n=2)
    done = [completion(text), completion(asked, 0, 4), completion(asked, 1, 6)]
    first, second = results([text, asked], done, unused)
    parsed = check(first)
    assert isinstance(parsed, TextCompletion)
    assert (parsed.model, parsed.created, parsed.choices[0].text) == ("models/small", 0, "text 0.0")
    assert (parsed.choices[0].finish_reason, parsed.choices[0].logprobs) == ("length", None)
    parsed = check(second)
    assert isinstance(parsed, ChatCompletion)
    assert [(c.index, c.message.content, c.message.role) for c in parsed.choices] == [
        (0, "text 1.0", "assistant"),
        (1, "text 1.1", "assistant"),
    ]
    assert parsed.usage is not None
    usage = parsed.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 10, 13)
    assert json.loads(second)["custom_id"] == "2"


def test_logprobs_have_texts_and_bytes() -> None:
    tokenizer = pieces_of(None)._tokenizer
    space, *parts = tokenizer(" \u20ac", add_special_tokens=False).input_ids
    tokens = (tokenizer.convert_tokens_to_ids("a"), space, *parts)
    entries = tuple(TokenLogprobs(-0.5 * i, ((tokens[0], -0.1), (t, -0.5 * i))) for i, t in enumerate(tokens))
    entries = (*entries[:-1], TokenLogprobs(float("-inf"), ()))
    whole, text = b"a \xe2\x82\xac", "a \u20ac"
    for asked in (request(0), chat(0)):
        done = Completion(asked, 0, text, tokens, "stop", 3, entries)
        parsed = check(results([asked], [done])[0])
        if isinstance(parsed, ChatCompletion):
            chosen = parsed.choices[0].logprobs
            assert chosen is not None
            assert chosen.content is not None
            assert b"".join(bytes(t.bytes or ()) for t in chosen.content) == whole
            assert [t.logprob for t in chosen.content] == [
                0.0,
                -0.5,
                *(-0.5 * i for i in range(2, len(tokens) - 1)),
                -9999.0,
            ]
            assert [top.token for top in chosen.content[1].top_logprobs] == ["a", chosen.content[1].token]
            assert chosen.content[-1].top_logprobs == []
        else:
            assert isinstance(parsed, TextCompletion)
            found = parsed.choices[0].logprobs
            assert found is not None
            names = found.tokens or []
            assert names[0] == "a"
            assert names[-1] == "bytes:\\xac"
            assert found.text_offset == [0, 1, *([2] * (len(tokens) - 2))]
            assert (found.token_logprobs or [])[-1] == -9999.0
            assert found.top_logprobs is not None
            assert found.top_logprobs[0] == {"a": 0.0}  # the chosen token and the most likely one are the same
            assert found.top_logprobs[-1] == {"bytes:\\xac": -9999.0}


def test_of_tokens_with_one_name_the_likelier_is_reported() -> None:
    item, nameless = request(0), (1 << 20, (1 << 20) + 1)
    entry = TokenLogprobs(-3.0, ((nameless[0], -0.1), (nameless[1], -0.2)))
    done = Completion(item, 0, "a", (2000,), "stop", 3, (entry,))
    parsed = check(results([item], [done])[0])
    assert isinstance(parsed, TextCompletion)
    found = parsed.choices[0].logprobs
    assert found is not None
    assert found.top_logprobs is not None
    assert found.top_logprobs[0][""] == -0.1
    assert sorted(found.top_logprobs[0].values()) == [-3.0, -0.1]


def test_errors_have_a_status() -> None:
    bad = BadLine(0, 1, "x", "p:1: bad")
    long = request(1)
    broken = request(2, n=2)
    done = [
        bad,
        Completion(long, error="p:2: too long"),
        completion(broken, 0),
        Completion(broken, 1, finish_reason="error", error=f"p:3: the logits {NOT_FINITE} at position 5"),
    ]
    found = results([bad, long, broken], done, unused)
    assert [isinstance(check(line), Failure) for line in found] == [True] * 3
    status = [(line["custom_id"], line["response"]["status_code"], line["error"]) for line in map(json.loads, found)]
    assert status == [
        ("x", 400, {"code": "invalid_request_error", "message": "p:1: bad"}),
        ("2", 400, {"code": "invalid_request_error", "message": "p:2: too long"}),
        ("3", 500, {"code": "server_error", "message": f"p:3: the logits {NOT_FINITE} at position 5"}),
    ]


def test_ids_are_of_the_lines_and_differ() -> None:
    items = [request(n) for n in range(3)]
    same = [replace(completion(item), text="same") for item in items]
    first = [json.loads(line) for line in results(items, same, unused)]
    assert len({line["id"] for line in first}) == len({line["response"]["body"]["id"] for line in first}) == 3
    assert [json.loads(line) for line in results(items, same, unused)] == first
    other = [json.loads(line) for line in results(items, [replace(c, text="other") for c in same], unused)]
    assert not {line["id"] for line in first} & {line["id"] for line in other}


def test_the_fingerprint_is_of_the_profile_and_not_of_places() -> None:
    def of(profile: dict[str, Any]) -> str:
        lines = result_lines(profile, [request(0)], lines_of([completion(request(0))]), Pieces(unused))
        fingerprint: str = json.loads(next(lines))["response"]["body"]["system_fingerprint"]
        return fingerprint

    target = PROFILE["target"]
    assert isinstance(target, dict)
    assert of(PROFILE) == of(PROFILE | {"target": target | {"name": "elsewhere"}})
    assert len({of(PROFILE), of(PROFILE | {"target": target | {"digest": "e"}}), of(PROFILE | {"dtype": "x"})}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": None, "prompt_tokens": None},
        {"text": 5, "completion_tokens": "5"},
        {"logprobs": [{"token": -1, "logprob": 0, "top": []}]},
        {"logprobs": [{"token": 2**40, "logprob": 0, "top": []}]},
        {"logprobs": [{"token": "a", "logprob": 0, "top": []}]},
        {"logprobs": 5},
        {"error": 5},
    ],
)
def test_lines_of_no_run_are_an_error(change: dict[str, Any]) -> None:
    item = request(0)
    lines = [line | change for line in lines_of([completion(item)])]
    if change.get("prompt_tokens", 0) is None:
        del lines[0]["prompt_tokens"]
    with pytest.raises(OutputError, match=r"outputs\.jsonl: the lines of prompt 1 are not those of a run"):
        list(result_lines(PROFILE, [item], lines, pieces_of(None)))


def test_lines_of_other_prompts_are_an_error() -> None:
    items = [request(n) for n in range(3)]
    lines = lines_of([completion(item) for item in items])
    assert [len(own) for _, own in beside(items, lines)] == [1, 1, 1]
    for wrong, words in (
        (items[:2], "lines after the last prompt"),
        ([*items, request(3)], "no line of prompt 4"),
        ([items[0], replace(items[1], id="other"), items[2]], "no line of prompt 2"),
        ([items[0], items[2]], "no line of prompt 3"),
    ):
        with pytest.raises(OutputError, match=words):
            list(beside(wrong, lines))
    bad = BadLine(0, 1, 1, "p:1: bad")
    with pytest.raises(OutputError, match="are not those of a run"):
        results([bad], [completion(items[0])], unused)


def test_any_text_can_be_written(tmp_path: Path) -> None:
    item = replace(request(0), id="\ud800", params=SamplingParams())
    (line,) = results([item], [replace(completion(item), text="\u2028\ud83d\x00\n")], unused)
    assert line.count(b"\n") == 1
    assert json.loads(line)["custom_id"] == "\ud800"
