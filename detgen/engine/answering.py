"""Turns finished sequences into the completions that callers get; those of chats have the parts of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from detgen.engine.answer import MARKS, Answer, ToolCall, goes_on_thinking, take_apart, thinks, tool_call
from detgen.engine.bounded import Bounded, BoundsError
from detgen.engine.request import Completion, Request, Thought
from detgen.engine.sequence import Sequence
from detgen.engine.tools import functions
from detgen.params import GUIDES

_TAIL = 16  # last tokens of a prompt that may contain a mark at its end, followed by white space
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names in response templates


class Answering:
    """Splits the answers of a model by its tokenizer's response template, or else by its chat template's marks.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._marks = frozenset(i for i in self._special if str(tokenizer.convert_ids_to_tokens(i)) in MARKS)
        self._misfit: Bounded[str | None] | None = None
        self._parse: Callable[..., Any] | None = None
        if getattr(tokenizer, "response_template", None) is not None:
            self._parse = Bounded(self._parsed)  # a stranger's regular expressions
            _ = tokenizer.parse_response  # a kept tokenizer loads transformers' own here, outside of a call's bounds

    def answer(self, seq: Sequence) -> Answer | None:
        """Return the parts of a finished sequence's answer; None if it is not a chat or has no parts."""
        request = seq.request
        if request.messages is None or not getattr(self._tokenizer, "chat_template", None):
            return None
        found = self._by_marks(seq) if self._parse is None else self._by_template(seq, self._parse)
        if found is None or not found.tool_calls:
            return found
        tools = functions(request.tools)
        calls = found.tool_calls if request.parallel_tool_calls else found.tool_calls[:1]
        return found._replace(tool_calls=tuple(self._judged(call, tools) for call in calls))

    def _judged(self, call: ToolCall, tools: dict[str, dict[str, Any]]) -> ToolCall:
        """Return the call, with what is wrong with it."""
        function = tools.get(call.name)
        if function is None:
            return call._replace(error=f"no tool has the name {call.name}")
        if function.get("strict") is not True or function.get("parameters") is None:
            return call
        if self._misfit is None:
            from detgen.engine.call_errors import misfit

            self._misfit = Bounded(misfit)  # a stranger's regular expressions
        try:
            place = self._misfit(function["parameters"], call.arguments)
        except BoundsError:
            return call._replace(
                error=f"the parameters of {call.name} are not a schema that arguments can be checked against"
            )
        if place is None:
            return call
        return call._replace(error=f"the arguments do not fit the parameters of {call.name}: {place}")

    def _by_marks(self, seq: Sequence) -> Answer | None:
        """Split an answer by the marks of the chat template."""
        request = seq.request
        template = self.template(request)
        if not any(mark in template for mark in MARKS) and not request.tools:
            return None
        return take_apart(
            template,
            self._text(seq, self._marks),
            opened=self.opened(template, request, seq.tokens[: seq.prompt_length]),
            closed=any(getattr(request.params, name) for name in GUIDES),
            tools=functions(request.tools),
            calls=request.tool_choice != "none",
        )

    def template(self, request: Request) -> str:
        """Return the template of a chat."""
        return str(self._tokenizer.get_chat_template(tools=request.tools or None))

    def spelled(self, mark: str) -> str:
        """Return a mark as llguidance's grammars spell it: as text, or as a special token."""
        of = self._tokenizer.convert_ids_to_tokens
        token = next((token for token in sorted(self._marks) if str(of(token)) == mark), None)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def opened(self, template: str, request: Request, prompt: list[int]) -> bool:
        """Return whether the prompt of a chat, given as token ids, ends inside a thought."""
        if request.continue_final_message and request.messages:
            content = request.messages[-1].get("content") or ""
            parts = content if isinstance(content, list) else [{"text": content}]
            return goes_on_thinking(template, "\n".join(part["text"] for part in parts))
        return thinks(template, self._decode(prompt[-_TAIL:]))

    def _text(self, seq: Sequence, special: frozenset[int]) -> str:
        """Return the text with these special tokens, cut where the text is cut."""
        completion = seq.tokens[seq.prompt_length :]
        if not special.intersection(completion):
            return seq.text
        if completion[-1] in seq.request.params.stop_token_ids:
            del completion[-1]
        whole = self._decode([token for token in completion if token not in self._special])
        text = self._decode([token for token in completion if token not in self._special or token in special])
        cut = whole[len(seq.text) :]
        return text.removesuffix(cut) if text.endswith(cut) else seq.text

    def _by_template(self, seq: Sequence, parse: Callable[..., Any]) -> Answer | None:
        request = seq.request
        try:
            prefix = self._decode(seq.tokens[: seq.prompt_length])
            message = parse(self._text(seq, self._special), prefix=prefix, tools=request.tools or None)
        except BoundsError:
            return None
        return _answer(message) if request.tool_choice != "none" or not message.get("tool_calls") else None

    def _parsed(self, text: str, **given: Any) -> dict[str, Any]:
        return dict(self._tokenizer.parse_response(text, **given))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _answer(message: dict[str, Any]) -> Answer | None:
    """Return the parts of a message made by transformers; None if it has none, or an invalid one."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    content = message.get("content")
    calls = []
    given = message.get("tool_calls") or []
    for each in given if isinstance(given, list) else [given]:
        function = each.get("function", each) if isinstance(each, dict) else None
        known = function if isinstance(function, dict) else {}
        calls.append(tool_call(known.get("name"), known.get("arguments")))
    found = tuple(call for call in calls if call is not None)
    if len(found) < len(calls) or not all(isinstance(part, str | None) for part in (thought, content)):
        return None
    return None if thought is None and not found else Answer(thought, content or None, found)


def completion_of(
    seq: Sequence, chunk: int | None, decode: Callable[[tuple[int, ...]], str], answering: Answering
) -> Completion:
    """Return the completion of a sequence.

    Args:
        seq: a finished sequence.
        chunk: tokens of a chunk; None if the target does not think.
        decode: gives the text of a thought's tokens.
        answering: splits answers.
    """
    if seq.error is not None:
        return Completion(
            seq.request, seq.sample, finish_reason="error", prompt_tokens=seq.prompt_length, error=seq.error
        )
    return Completion(
        request=seq.request,
        sample=seq.sample,
        text=seq.text,
        token_ids=tuple(seq.tokens[seq.prompt_length :]),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        prompt_tokens=seq.prompt_length,
        logprobs=tuple(seq.logprobs) if seq.request.params.logprobs is not None else None,
        records=tuple(seq.records),
        drafts=seq.drafts,
        thoughts=None if chunk is None else tuple(_thoughts(seq, chunk, decode)),
        answer=answering.answer(seq),
    )


def _thoughts(seq: Sequence, chunk: int, decode: Callable[[tuple[int, ...]], str]) -> Iterator[Thought]:
    """Yield the thoughts of all chunks that have one."""
    for i, tokens in enumerate(seq.thoughts):
        if tokens:
            yield Thought(i * chunk, tokens, decode(tokens))
