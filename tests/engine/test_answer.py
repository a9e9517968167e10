"""Answers taken apart, by the marks of templates in the manner of the families that have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from detgen.engine.answer import Answer, ToolCall, goes_on_thinking, take_apart, thinks

QWEN = "{{ '<tool_call>' }}{{ '</tool_call>' }}{{ content.split('</think>')[-1] }}"
LLAMA = """{{ '<|python_tag|>' }}{{ '{"name": "' + name + '", "parameters": ' }}"""
LLAMA_3_2 = """{{ '{"name": "' + name + '", "parameters": ' }}"""
MISTRAL = "{{ '[TOOL_CALLS]' }}{{ '[/TOOL_RESULTS]' }}"
MAGISTRAL = "{{ '[THINK]' }}{{ '[/THINK]' }}{{ '[TOOL_CALLS]' }}{{ '[ARGS]' }}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '{"name": "f", "arguments": {"x": [1.5, null]}}'
CALLED = ToolCall("f", '{"x": [1.5, null]}')
META = '{"name": "f", "parameters": {"x": [1.5, null]}}'


def parts(template: str, text: str, **given: Any) -> Answer | None:
    return take_apart(template, text, **{"tools": {"f", "g"}, "calls": True, **given})


@pytest.mark.parametrize(
    ("template", "text", "answer"),
    [
        (QWEN, "<think>\nhm\n</think>\n\nYes. \n", Answer("hm", "Yes. \n", ())),
        (QWEN, "\n<think>hm</think>", Answer("hm", None, ())),
        (QWEN, "<think>hm", Answer("hm", None, ())),
        (QWEN, f"Look.\n<tool_call>\n{CALL}\n</tool_call>", Answer(None, "Look.", (CALLED,))),
        (QWEN, f"<think>a</think><tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", Answer("a", None, (CALLED,) * 2)),
        (QWEN, f"<tool_call>[{CALL}, {CALL}]</tool_call>", Answer(None, None, (CALLED, CALLED))),
        (
            QWEN,
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            Answer(None, None, (ToolCall("f", '{"x": "</tool_call>"}'),)),
        ),
        (
            QWEN,
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"é\\"}"}</tool_call>',
            Answer(None, None, (ToolCall("f", '{"x": "é"}'),)),
        ),
        (
            QWEN,
            f'<tool_call>{{"name": }}</tool_call><tool_call>{CALL}</tool_call>',
            Answer(None, '<tool_call>{"name": }</tool_call>', (CALLED,)),
        ),
        (
            QWEN,
            '<tool_call>{ "arguments" :{"x":1.50, "x" : 1e999,"\\u00e9":[ ]} ,"id":[{}], "name":"f"}</tool_call>',
            Answer(None, None, (ToolCall("f", '{"x":1.50, "x" : 1e999,"\\u00e9":[ ]}'),)),
        ),
        (
            MAGISTRAL,
            '[TOOL_CALLS]f[ARGS] {"x":1E2,\n"y":{}}\n[TOOL_CALLS]g[ARGS]{ }',
            Answer(None, None, (ToolCall("f", '{"x":1E2,\n"y":{}}'), ToolCall("g", "{ }"))),
        ),
        (
            MISTRAL,
            '[TOOL_CALLS][ {"name":"f","arguments":{"a":[1,{"b":"]"}]}} ,{"name":"g","arguments":"{\\"x\\":1.0}"} ]',
            Answer(None, None, (ToolCall("f", '{"a":[1,{"b":"]"}]}'), ToolCall("g", '{"x":1.0}'))),
        ),
        (LLAMA, f"<|python_tag|>{META}; {META}", Answer(None, None, (CALLED, CALLED))),
        (LLAMA, f"Well: <|python_tag|>{META}\n", Answer(None, "Well:", (CALLED,))),
        (LLAMA_3_2, f" {META}", Answer(None, None, (CALLED,))),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", Answer(None, None, (CALLED,))),
        (MISTRAL, f"So [TOOL_CALLS][{CALL}, {CALL}]", Answer(None, "So", (CALLED, CALLED))),
        (
            MAGISTRAL,
            '[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]a.b-c[CALL_ID]9[ARGS]{}',
            Answer("hm", None, (ToolCall("f", '{"x": 1}'), ToolCall("a.b-c", "{}"))),
        ),
    ],
)
def test_parts(template: str, text: str, answer: Answer) -> None:
    assert parts(template, text) == answer
    assert all(json.loads(call.arguments) is not None for call in answer.tool_calls)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN, f"<think>hm</think><tool_call>{CALL}</tool_call>"),
        (QWEN, "Yes, <think>hm</think>"),
        (QWEN, "hm</think>Yes"),
        (QWEN, f"{CALL}"),
        (QWEN, f"<tool_call>{CALL[:-1]}</tool_call>"),
        (QWEN, f"<tool_call>{CALL} and</tool_call>"),
        (QWEN, '<tool_call>{"name": "f"}</tool_call>'),
        (QWEN, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (QWEN, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (QWEN, '<tool_call>{"name": "f", "arguments": "1"}</tool_call>'),
        (QWEN, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        (QWEN, '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>"),
        (QWEN, "<tool_call>[]</tool_call>"),
        (QWEN, "<tool_call>" + "[" * 100_000),
        (QWEN, '<tool_call>{"' * 10_000),
        (LLAMA_3_2, META.replace('"f"', '"unknown"')),
        (LLAMA_3_2, f"{META} and more"),
        (LLAMA_3_2, '{"name": "f", "age": 3}'),
        (LLAMA, '<|python_tag|>print("hi")'),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{} and more"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS][1]"),
        (MISTRAL, "[TOOL_CALLS]"),
        (QWEN, ""),
    ],
)
def test_all_else_has_no_parts(template: str, text: str) -> None:
    assert parts(template, text) is None


def test_a_thought_that_the_prompt_opened() -> None:
    assert parts(QWEN, "hm\n</think>\nYes", opened=True) == Answer("hm", "Yes", ())
    assert parts(QWEN, "<think>\nhm</think>Yes", opened=True) == Answer("hm", "Yes", ())
    assert parts(QWEN, "hm", opened=True) == Answer("hm", None, ())
    assert parts(QWEN, '{"a": 1}', opened=True, closed=True) is None
    assert parts(QWEN, 'hm</think>{"a": 1}', opened=True, closed=True) == Answer("hm", '{"a": 1}', ())
    assert parts(PLAIN, "hm</think>Yes", opened=True) is None


def test_where_a_prompt_opens_one() -> None:
    assert thinks(QWEN, "<|im_start|>assistant\n<think>\n")
    assert not thinks(QWEN, "<think>\n\n</think>\n\n")
    assert not thinks(PLAIN, "<think>")
    assert goes_on_thinking(QWEN, "<think>so far")
    assert not goes_on_thinking(QWEN, "<think>so far</think>Yes")
    assert not goes_on_thinking(QWEN, "Yes")


def test_calls_are_asked_for() -> None:
    """Nor is anything without a mark a call if there are no tools."""
    assert parts(QWEN, f"<tool_call>{CALL}</tool_call>", calls=False) is None
    assert parts(QWEN, f"<think>a</think><tool_call>{CALL}</tool_call>", calls=False) == Answer(
        "a", f"<tool_call>{CALL}</tool_call>", ()
    )
    assert parts(LLAMA_3_2, META, tools=()) is None
    assert parts(LLAMA, f"<|python_tag|>{META}", tools=()) == Answer(None, None, (CALLED,))
