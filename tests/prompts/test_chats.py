"""Chats in the shapes that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import error, one, read, write

from detgen.engine.request import Request
from detgen.prompts import BadLine

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(tmp_path: Path, *messages: Any, **keys: Any) -> Request | BadLine:
    return one(tmp_path, json.dumps({"messages": messages, **keys}))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "a", "tool_calls": None},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "3"},
        {"role": "tool", "content": [{"type": "text", "text": "3"}]},
    ],
)
def test_messages_are_carried_as_they_are(tmp_path: Path, message: dict[str, Any]) -> None:
    item = chat(tmp_path, USER, message)
    assert isinstance(item, Request)
    assert item.messages == [USER, message]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": None}, "messages[1].content must be a string, got null"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content must be a string, got null"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "messages[1].content must be a string, got null"),
        ({"role": "assistant", "tool_calls": CALL}, "messages[1].tool_calls must be a list of objects, got an object"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[1].tool_calls[0] must be an object, got a number"),
        ({"role": "user", "content": []}, "messages[1].content must be a string, got a list"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content must be a string, got an object"),
        (
            {"role": "user", "content": ["a"]},
            'messages[1].content[0] must be an object such as {"type": "text", "text": "..."}, got a string',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "messages[1].content[1].type must be 'text', got 'image_url'; detgen reads only text",
        ),
        (
            {"role": "user", "content": [{"text": "a"}]},
            "messages[1].content[0].type must be 'text', got nothing; detgen reads only text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 3}]},
            "messages[1].content[0].text must be a string, got a number",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "\ud800"}]},
            r"messages[1].content[0].text holds half a character, \ud800 at position 0",
        ),
    ],
)
def test_messages_that_are_no_text_are_refused(tmp_path: Path, message: dict[str, Any], reason: str) -> None:
    assert error(tmp_path, json.dumps({"messages": [USER, message]})) == f"p.jsonl:1: {reason}"


def test_what_the_template_is_given(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    last = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    keys = {
        "tools": tools,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
    }
    item = chat(tmp_path, USER, last, **keys)
    assert isinstance(item, Request)
    assert {name: getattr(item, name) for name in keys} == keys
    assert not item.metadata
    plain = chat(tmp_path, USER)
    empty: dict[str, Any] = {"tools": [], "tool_choice": "auto", "chat_template_kwargs": {}}
    empty |= {"reasoning_effort": None, "continue_final_message": False, "parallel_tool_calls": True}
    assert chat(tmp_path, USER, **empty) == plain
    assert chat(tmp_path, USER, **dict.fromkeys(empty)) == plain


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tools": {"type": "function"}}, "tools must be a list of objects, got an object"),
        ({"tools": ["f"]}, "tools[0] must be an object, got a string"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, got a list"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, got a number"),
        ({"continue_final_message": 1}, "continue_final_message must be true or false, got a number"),
        (
            {"continue_final_message": True},
            "continue_final_message needs a last message of the assistant that has a text",
        ),
        ({"reasoning_effort": "hgih"}, "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort has another value in chat_template_kwargs; give it once",
        ),
        ({"tools": [{"name": "f"}, {"function": {"name": "f"}}]}, "tools has two functions called f; give each a name"),
        (
            {"tools": [{"name": "f"}, {"type": "custom", "custom": {"name": "g"}}]},
            "tools[1] has the type 'custom', which is not supported; only functions are tools here",
        ),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": [{"name": "f"}]},
            "tool_choice has the type 'custom', which is not supported",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [{"name": "f"}]},
            "tool_choice has the type 'allowed_tools', which is not supported",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools that are functions with a name"),
        ({"tool_choice": "any"}, "tool_choice must be auto, none, required or an object that names a function, got"),
        (
            {"tool_choice": {"function": {"name": "f"}}},
            'tool_choice must be auto, none, required or {"type": "function"',
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"name": "f"}]},
            "tool_choice names 'g', which is not among tools: f",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt is supported only as true here: "),
    ],
)
def test_wrong_settings_of_a_chat_are_refused(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    found = chat(tmp_path, USER, **keys)
    assert isinstance(found, BadLine)
    assert found.error.startswith(f"p.jsonl:1: {reason}")


@pytest.mark.parametrize("content", ["", "  ", None, [{"type": "text", "text": " "}]])
def test_nothing_cannot_be_continued(tmp_path: Path, content: Any) -> None:
    last = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    found = chat(tmp_path, USER, last, continue_final_message=True)
    assert isinstance(found, BadLine)
    assert found.error.endswith("continue_final_message needs a last message of the assistant that has a text")


def test_an_effort_is_a_variable_of_the_template(tmp_path: Path) -> None:
    item = chat(tmp_path, USER, reasoning_effort="low", chat_template_kwargs={"a": 1})
    assert isinstance(item, Request)
    assert item.chat_template_kwargs == {"a": 1, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tools", [{}]), ("tool_choice", "none"), ("chat_template_kwargs", {"a": 1})),
        *(("reasoning_effort", "low"), ("continue_final_message", True)),
    ],
)
@pytest.mark.parametrize("content", [{"prompt": "a"}, {"prompt_token_ids": [1]}])
def test_settings_of_a_chat_need_one(tmp_path: Path, content: dict[str, Any], key: str, value: Any) -> None:
    assert error(tmp_path, json.dumps({**content, key: value})) == (
        f'p.jsonl:1: {key} needs messages; leave it out, or put it into "metadata" if it is not a setting'
    )


def test_token_ids(tmp_path: Path) -> None:
    item = one(tmp_path, '{"prompt_token_ids": [5, 0, 7], "prompt": null, "id": "t"}')
    assert isinstance(item, Request)
    assert (item.token_ids, item.prompt, item.messages, item.id) == ((5, 0, 7), None, None, "t")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt_token_ids": "5"}', "prompt_token_ids must be a list of whole numbers, got a string"),
        ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
        ('{"prompt_token_ids": [1, -2]}', "prompt_token_ids[1] must be a whole number of at least 0, got -2"),
        ('{"prompt_token_ids": [1.0]}', "prompt_token_ids[0] must be a whole number of at least 0, got a number"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids[0] must be a whole number of at least 0, got true or false"),
        ('{"prompt_token_ids": [[1]]}', "prompt_token_ids[0] must be a whole number of at least 0, got a list"),
        ('{"prompt_token_ids": [1], "prompt": "a"}', "both prompt and prompt_token_ids are given; give one of them"),
        (
            '{"prompt_token_ids": [1], "messages": [1]}',
            "both messages and prompt_token_ids are given; give one of them",
        ),
    ],
)
def test_token_ids_that_are_none(tmp_path: Path, line: str, reason: str) -> None:
    assert error(tmp_path, line) == f"p.jsonl:1: {reason}"


def test_cells_hold_lists_and_objects(tmp_path: Path) -> None:
    text = (
        "messages,tools,chat_template_kwargs,continue_final_message,prompt_token_ids,metadata,stop,max_new_tokens\n"
        '"[{""role"": ""user"", ""content"": ""a""}]","[{""type"": ""function""}]","{""x"": 1}",,,"{""k"": 2}",{,3.0\n'
        '"[{""role"": ""assistant"", ""content"": ""a""}]",,,TRUE,,plain,,\n'
        ',,,,"[1, 2]",{broken,"[""x""]",\n'
        ",,,,five,,,\n"
        '"[{""role"": ""user"", ""content"": ""a""}]",[broken,,,,,,\n'
        '"[{""role"": ""user"", ""content"": ""a""}]",,,perhaps,,,,\n'
    )
    first, second, third, *bad = read(write(tmp_path, "p.csv", text))
    assert isinstance(first, Request)
    assert (first.tools, first.chat_template_kwargs, first.metadata) == ([{"type": "function"}], {"x": 1}, {"k": 2})
    assert (first.params.stop, first.params.max_tokens) == (("{",), 3)
    assert isinstance(second, Request)
    assert (second.continue_final_message, second.metadata) == (True, {"metadata": "plain"})
    assert isinstance(third, Request)
    assert (third.token_ids, third.metadata, third.params.stop) == ((1, 2), {"metadata": "{broken"}, ("x",))
    assert [item.error for item in bad if isinstance(item, BadLine)] == [
        "p.csv:5: prompt_token_ids: not valid JSON: Expecting value at column 1",
        "p.csv:6: tools: not valid JSON: Expecting value at column 2",
        "p.csv:7: continue_final_message must be true or false, got a string",
    ]


def test_typed_tables_hold_chats(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    rows = [
        {"messages": [USER, calling], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "g"}}],
            "chat_template_kwargs": {"a": 1},
        },
        {"messages": [USER], "chat_template_kwargs": {"b": 2}},
        {"prompt_token_ids": [4, 5], "metadata": {"k": 1}},
    ]
    keys = ("messages", "tools", "chat_template_kwargs", "prompt_token_ids", "metadata")
    pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(keys), **row} for row in rows]), tmp_path / "p.parquet")
    first, second, other, third = read(tmp_path / "p.parquet")
    assert isinstance(first, Request)
    assert first.messages == [USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert isinstance(second, Request)
    assert (second.tools, second.chat_template_kwargs) == (rows[1]["tools"], {"a": 1})
    assert isinstance(other, Request)
    assert (other.tools, other.chat_template_kwargs) == (None, {"b": 2})
    assert isinstance(third, Request)
    assert (third.token_ids, third.metadata) == ((4, 5), {"k": 1})
