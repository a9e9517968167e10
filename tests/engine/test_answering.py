"""From a chat's tokens to its parts: marks that are special tokens, thoughts of prompts, response templates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

from detgen import Request
from detgen.engine.answer import Answer, ToolCall
from detgen.engine.answering import Answering, _answer
from detgen.engine.bounded import Bounded
from detgen.engine.sequence import Sequence
from detgen.engine.stopping import Stopping
from detgen.errors import DEMO
from detgen.models.kept_tokenizer import KeptTokenizer, facts_of
from detgen.params import SamplingParams

MARKED = "{{ '[TOOL_CALLS]' }}{{ '</think>' }}"
CALL = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]'
CALLED = ToolCall("f", '{"x": 1}')
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
STRICT = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "maximum": 99}},
}
RESPONSE = {
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(DEMO / "target")
    found.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<|other|>"]})
    return found


def answer(tokenizer: Any, text: str, prompt: str = "hi", template: str = MARKED, **fields: Any) -> Answer | None:
    """The parts of a text that a chat wrote after a prompt."""
    tokenizer.chat_template = template
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    request = Request(0, "a", **{**chat, **fields})
    written = tokenizer(text, add_special_tokens=False).input_ids
    seq = Sequence(request, 0, [*tokens, *written], len(tokens), 9999, frozenset({tokenizer.eos_token_id}))
    seq.finish_reason = "stop"
    seq.text = Stopping(tokenizer).text(seq)
    assert "[TOOL_CALLS]" not in seq.text
    return Answering(tokenizer).answer(seq)


@pytest.mark.parametrize(
    ("call", "function", "error"),
    [
        ('{"name": "f", "arguments": {"n": 1}}', {"strict": True, "parameters": STRICT}, None),
        (
            '{"name": "f", "arguments": {"n":  "one", "z": 1}}',
            {"strict": True, "parameters": STRICT},
            "the arguments do not fit the parameters of f: $ (additionalProperties)",
        ),
        (
            '{"name": "f", "arguments": {"n": 100}}',
            {"strict": True, "parameters": STRICT},
            "the arguments do not fit the parameters of f: $.n (maximum)",
        ),
        ('{"name": "f", "arguments": {"n": 100}}', {"parameters": STRICT}, None),
        ('{"name": "f", "arguments": {"n": 100}}', {"strict": True}, None),
        ('{"name": "g", "arguments": {}}', {}, "no tool has the name g"),
        *(
            (
                '{"name": "f", "arguments": {"n": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}}',
                {"strict": True, "parameters": {"properties": {"n": broken}}},
                "the parameters of f are not a schema that arguments can be checked against",
            )
            for broken in ({"type": "x"}, {"$ref": "http://127.0.0.1/x"}, {"$ref": "#/y"}, {"pattern": "^(a+)+$"})
        ),
    ],
)
def test_what_is_wrong_with_a_call(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, call: str, function: dict[str, Any], error: str | None
) -> None:
    """It stays a call, letter by letter, and says so."""
    monkeypatch.setattr("detgen.engine.answering.Bounded", partial(Bounded, seconds=0.5))
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    found = answer(tokenizer, f"[TOOL_CALLS] [{call}]", tools=tools)
    assert found is not None
    assert [each.error for each in found.tool_calls] == [error]
    assert f'"arguments": {found.tool_calls[0].arguments}' in call


def test_one_call_is_kept_where_several_are_not_wanted(tokenizer: Any) -> None:
    twice = CALL.replace("}]", '}, {"name": "f", "arguments": {"x": 2}}]')
    assert answer(tokenizer, twice) == Answer(None, None, (CALLED, CALLED._replace(arguments='{"x": 2}')))
    assert answer(tokenizer, twice, parallel_tool_calls=False) == Answer(None, None, (CALLED,))


def test_marks_that_are_special_tokens(tokenizer: Any) -> None:
    called = Answer(None, None, (CALLED,))
    assert answer(tokenizer, CALL) == called
    assert answer(tokenizer, f"<|other|>{CALL}{tokenizer.eos_token}") == called
    assert answer(tokenizer, f"<think>a<|other|></think>So {CALL}") == Answer("a", "So", (CALLED,))
    assert answer(tokenizer, "<think>a</think>Yes<|other|>") == Answer("a", "Yes", ())
    assert answer(tokenizer, CALL, tool_choice="none") is None


def test_a_text_is_cut_where_it_was_stopped(tokenizer: Any) -> None:
    stopped = SamplingParams(stop=["END"])
    assert answer(tokenizer, f"{CALL}END", params=stopped) == Answer(None, None, (CALLED,))
    last = tokenizer("!", add_special_tokens=False).input_ids[-1]
    assert answer(tokenizer, f"{CALL}!", params=SamplingParams(stop_token_ids=[last])) == Answer(None, None, (CALLED,))
    assert answer(tokenizer, f"{CALL}!") is None


def test_a_thought_that_the_prompt_began(tokenizer: Any) -> None:
    assert answer(tokenizer, "a</think>Yes", "hi<think>\n") == Answer("a", "Yes", ())
    assert answer(tokenizer, "a</think>Yes", "hi<think>\n\n</think>\n\n") is None
    last = [{"role": "assistant", "content": "<think>so"}]
    assert answer(tokenizer, " a</think>Yes", messages=last, continue_final_message=True) == Answer("a", "Yes", ())
    assert answer(tokenizer, '{"a": 1}', "<think>", params=SamplingParams(guided_json={"type": "object"})) is None


def test_what_is_no_chat_has_no_parts(tokenizer: Any) -> None:
    assert answer(tokenizer, CALL, messages=None, prompt="hi") is None
    assert answer(tokenizer, CALL, template="{{ messages }}") is None


def test_a_response_template_decides(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "response_template", RESPONSE)
    call = '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}'
    assert answer(tokenizer, f"a</think>So {call}", "<bot><think>", "x") == Answer("a", "So", (CALLED,))
    assert answer(tokenizer, f"a</think>So {call}", "<bot><think>", "x", tool_choice="none") is None
    assert answer(tokenizer, "Yes", "<bot>", "x") is None
    assert answer(tokenizer, "[TOOL_CALLS]{broken", "<bot>", "x") is None
    facts = facts_of(tokenizer, DEMO / "target")
    assert facts is not None
    assert KeptTokenizer(facts, DEMO / "target", lambda: None).response_template == RESPONSE


@pytest.mark.parametrize("calls", [[{"function": None}], [{"function": [1]}], 3, "x", [None], [{"name": "f"}]])
def test_what_a_template_takes_for_calls_may_be_anything(calls: Any) -> None:
    """Then there are none, and the text stays whole."""
    assert _answer({"content": "x", "tool_calls": calls}) is None
