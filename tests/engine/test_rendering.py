"""From a chat to text: what templates are given, and what they may not leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from detgen import Engine, Request, RequestError
from detgen.engine.rendering import chat_renderer, render_chat

# In the manner of templates with tools and thinking: what it is given, in brackets.
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[call {{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]"
    "{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% endif %}"
)
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def render(engines: Callable[..., Engine]) -> Callable[..., str]:
    """Renders messages with a template: `render(*messages, template=..., tools=...)`."""
    tokenizer = copy.deepcopy(engines(drafter="none").tokenizer)

    def render(*messages: dict[str, Any], template: str = TEMPLATE, **fields: Any) -> str:
        tokenizer.chat_template = template
        return render_chat(
            tokenizer, "model", Request(0, 0, messages=list(messages), **fields), chat_renderer(tokenizer)
        )

    return render


def test_a_plain_chat(render: Callable[..., str]) -> None:
    assert render(USER) == "<user>hi</><assistant>"


def test_parts_are_joined_by_line_breaks(render: Callable[..., str]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render({"role": "user", "content": parts}) == "<user>a\nb</><assistant>"
    assert render({"role": "user", "content": parts[:1]}) == "<user>a</><assistant>"


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_and_answers_of_tools(
    render: Callable[..., str], content: dict[str, Any], arguments: str | dict[str, Any]
) -> None:
    """Arguments come as JSON in a string; content that is null is never the word None."""
    messages = (
        USER,
        {
            "role": "assistant",
            **content,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "3"}]},
    )
    kept = copy.deepcopy(messages)
    assert render(*messages) == "<user>hi</><assistant>[call f x=1]</><tool f>3</><assistant>"
    assert messages == kept


@pytest.mark.parametrize("call", ["f", {}, {"function": "f"}, {"function": {"arguments": "{broken"}}])
def test_calls_of_any_shape_are_left_to_the_template(render: Callable[..., str], call: Any) -> None:
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    assert render({"role": "assistant", "tool_calls": [call]}, template=template)


def test_calls_of_what_is_no_function_are_refused(render: Callable[..., str]) -> None:
    calls = [{"function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g", "input": "x"}}]
    reason = (
        r"messages\[1\]\.tool_calls\[1\] has the type 'custom', which is not supported; only functions are tools here"
    )
    with pytest.raises(RequestError, match=reason):
        render(USER, {"role": "assistant", "content": "", "tool_calls": calls})


def test_the_last_message_is_continued(render: Callable[..., str]) -> None:
    last = {"role": "assistant", "content": "It is "}
    assert render(USER, last) == "<user>hi</><assistant>It is </><assistant>"
    assert render(USER, last, continue_final_message=True) == "<user>hi</><assistant>It is "
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It"}]}
    assert render(USER, parts, continue_final_message=True) == "<user>hi</><assistant>It"


def test_tools_and_variables_reach_the_template(render: Callable[..., str]) -> None:
    assert render(USER, tools=[{"name": "f"}]) == '[tools [{"name": "f"}]]<user>hi</><assistant>'
    assert render(USER, chat_template_kwargs={"enable_thinking": False}) == "<user>hi</><assistant>False"


@pytest.mark.parametrize(
    ("fields", "template", "reason"),
    [
        ({"tools": [{}]}, "{{ messages }}", "the model's chat template does not use tools; leave them out"),
        (
            {"chat_template_kwargs": {"enable_thinkin": True}},
            TEMPLATE,
            "the model's chat template does not use enable_thinkin; leave it out",
        ),
        ({"chat_template_kwargs": {"": True}}, TEMPLATE, "the model's chat template does not use ''; leave it out"),
        (
            {"chat_template_kwargs": {"chat_template": "x"}},
            TEMPLATE,
            "chat_template_kwargs cannot set chat_template; give it beside messages, if it is known there",
        ),
        ({"chat_template_kwargs": {"messages": []}}, TEMPLATE, "chat_template_kwargs cannot set messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, TEMPLATE, "chat_template_kwargs cannot set tokenize"),
        ({}, "{{ raise_exception('no') }}", "the chat template refuses these messages: no"),
        ({}, "{% broken", "the chat template refuses these messages: "),
        ({}, "{{ 1 // 0 }}", "the chat template refuses these messages: "),
        ({}, "", "model has no chat template, so messages cannot be rendered; use prompt instead"),
    ],
)
def test_what_a_template_refuses_or_would_leave_out(
    render: Callable[..., str], fields: dict[str, Any], template: str, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        render(USER, template=template, **fields)
    assert str(caught.value).startswith(reason)


def test_a_long_reason_is_cut(render: Callable[..., str]) -> None:
    last = {"role": "assistant", "content": "x" * 100_000}
    with pytest.raises(RequestError) as caught:
        render(USER, last, template="{{ messages[0].content }}", continue_final_message=True)
    assert len(str(caught.value)) < 600


def test_half_a_character_anywhere_is_refused(engines: Callable[..., Engine], render: Callable[..., str]) -> None:
    with pytest.raises(RequestError, match=r"the messages hold half a character, \\ud800, where they are rendered"):
        render({**USER, "name": "a\ud800"})
    engine = engines(drafter="none")
    request = Request(0, 0, messages=[{"role": "user", "content": "\ud800"}])
    assert "half a character" in (engine.generate([request])[0].error or "")
