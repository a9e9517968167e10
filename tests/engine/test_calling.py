"""Calls that a choice of tools asks for: real models make them, in the template's own markers, whoever drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from detgen import Engine, Request, SamplingParams
from detgen.engine.request import Completion

_HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_OLD = "{% if old %}"  # how templates spell what an assistant answered before
TAGGED = _HEAD + _OLD + "<think>{{ old }}</think><tool_call>{{ old }}</tool_call>{% endif %}<bot>"
OPENED = _HEAD + _OLD + "</think>{% endif %}<bot><think>\n"
BARE = _HEAD + 'Respond with {"name": function name, "parameters": the arguments}.<bot>'
LISTED = _HEAD + _OLD + "[TOOL_CALLS]{% endif %}<bot>"
PLAIN = _HEAD + "<bot>"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}, "s": {"enum": ["a", 'b"'], "type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "put-it"}},
]
NAMED = {"type": "function", "function": {"name": "put-it"}}
USER = [{"role": "user", "content": "Call a tool."}]
CALLS = TAGGED.replace("<think>{{ old }}</think>", "")
LISTED_BY_NAME = LISTED.replace("[TOOL_CALLS]", "[TOOL_CALLS][ARGS]")


@pytest.fixture
def templated(engines: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Engines whose tokenizer has another chat template: `templated(template, drafter=...)`."""
    changed: list[tuple[Any, Any]] = []

    def make(template: str, **settings: Any) -> Engine:
        engine = engines(**settings)
        changed.append((engine.tokenizer, engine.tokenizer.chat_template))
        engine.tokenizer.chat_template = template
        return engine

    yield make
    for tokenizer, template in reversed(changed):
        tokenizer.chat_template = template


def chat(choice: Any, i: int = 0, **params: Any) -> Request:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": i, "max_tokens": 120, **params}
    return Request(i, i, messages=USER, tools=TOOLS, tool_choice=choice, params=SamplingParams(**asked))


@pytest.mark.parametrize("template", [CALLS, BARE, LISTED, LISTED_BY_NAME])
def test_calls_are_made(templated: Callable[..., Engine], template: str) -> None:
    """Every text that ends calls a tool that there is, with arguments that fit; one that is named is called once."""
    engine = templated(template, drafter="auto", batch_size=8)
    done = engine.generate([chat("required" if i % 2 else NAMED, i) for i in range(8)])
    assert not [each.error for each in done if each.error]
    ended = [each for each in done if each.finish_reason == "stop"]
    assert len(ended) >= 4
    for each in ended:
        calls = [call._asdict() for call in each.answer.tool_calls] if each.answer is not None else []
        assert calls
        if each.request.tool_choice == NAMED:
            assert [call["name"] for call in calls] == ["put-it"]
        for call in calls:
            jsonschema.validate(
                json.loads(call["arguments"]), SCHEMA if call["name"] == "get" else {"maxProperties": 0}
            )


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("template", [CALLS, LISTED, LISTED_BY_NAME])
def test_several_calls_fit_unless_they_are_not_wanted(
    templated: Callable[..., Engine], template: str, parallel: bool
) -> None:
    engine = templated(template, drafter="none", batch_size=8)
    [seq] = engine.sequences(replace(chat("required"), parallel_tool_calls=parallel))
    assert seq.structure is not None
    call = '{"name": "put-it", "arguments": {}}'
    text = {
        CALLS: "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * 2),
        LISTED: f"[TOOL_CALLS][{call}, {call}]",
        LISTED_BY_NAME: "[TOOL_CALLS]put-it[ARGS]{}" * 2,
    }[template]
    ids = engine.tokenizer(text, add_special_tokens=False).input_ids
    matcher = seq.structure.start()
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is parallel


@pytest.mark.parametrize(
    ("template", "text", "fits"),
    [
        (OPENED, "Hm <x\n</think>\n\n{}", True),
        (OPENED, "</think>{}", True),
        (OPENED, "{}", False),
        (OPENED, "<think>{}</think>", False),
        (TAGGED, "<think>\nHm.</think>\n\n{}", True),
        (TAGGED, "{}", True),
        (TAGGED, "Hm. {}", False),
    ],
)
def test_a_model_may_reason_before_it_calls(
    templated: Callable[..., Engine], template: str, text: str, fits: bool
) -> None:
    """It has to end what the prompt began."""
    engine = templated(template.replace("</think>", "</think><tool_call>"), drafter="none", batch_size=8)
    [seq] = engine.sequences(chat(NAMED))
    assert seq.structure is not None
    call = '<tool_call>\n{"name": "put-it", "arguments": {}}\n</tool_call>'
    ids = engine.tokenizer(text.replace("{}", call), add_special_tokens=False).input_ids
    matcher = seq.structure.start()
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


def test_the_same_whoever_drafts(templated: Callable[..., Engine]) -> None:
    """Mixed with other requests, in any batch."""
    mixed = [
        replace(request, index=i, id=i)
        for i, request in enumerate(
            [
                *(chat("required"), chat("auto", max_tokens=20), chat(NAMED, temperature=0.0), chat("required", 5)),
                Request(prompt="x = ", params=SamplingParams(max_tokens=20)),
            ]
        )
    ]

    def made(**settings: Any) -> list[tuple[Any, ...]]:
        done: list[Completion] = templated(CALLS, **settings).generate(mixed)
        return [(each.text, each.token_ids, each.answer, each.finish_reason) for each in done]

    expected = made(drafter="none", batch_size=1)
    assert expected[2][2].tool_calls
    for settings in ({"drafter": "auto", "batch_size": 7}, {"drafter": "ngram", "batch_size": 2}):
        assert made(**settings) == expected


@pytest.mark.parametrize(
    ("template", "change", "reason"),
    [
        (PLAIN, {}, "tool_choice needs a chat template that spells calls in a way that detgen knows"),
        (
            LISTED_BY_NAME,
            {"tools": [{"name": "größe x"}]},
            "tool_choice cannot be combined with a tool called 'größe x': in calls as this model spells them",
        ),
        (TAGGED, {"tools": [{"name": "f", "parameters": []}]}, "tool_choice needs parameters of f that are a schema"),
        (TAGGED, {"tool_choice": "any"}, "tool_choice must be auto, none, required or "),
        (TAGGED, {"params": SamplingParams(guided_regex="a")}, "both tool_choice and guided_regex say what the text"),
        (
            TAGGED,
            {"params": SamplingParams(guided_regex="a"), "form_key": "structured_outputs.regex"},
            "both tool_choice and structured_outputs.regex say what the text must be; give one of them",
        ),
        (
            TAGGED,
            {"params": SamplingParams(ignore_eos=True)},
            "ignore_eos cannot be combined with tool_choice: a text that fits",
        ),
        (
            TAGGED,
            {"tools": [{"name": "f", "parameters": {"type": "array"}}]},
            "tool_choice needs parameters of f that are a schema of an object",
        ),
        (
            TAGGED,
            {"tools": [{"name": "f", "parameters": {"type": "object", "not": {}}}]},
            'tool_choice cannot be combined with the parameters of f: Unimplemented keys: ["not"]',
        ),
    ],
)
def test_what_cannot_be_asked(
    templated: Callable[..., Engine], template: str, change: dict[str, Any], reason: str
) -> None:
    [done] = templated(template, drafter="none", batch_size=8).generate([replace(chat("required"), **change)])
    assert done.error is not None
    assert done.error.startswith(reason)
