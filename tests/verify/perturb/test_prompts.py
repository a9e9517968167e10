"""A user's prompts: they are checked as they are, and the others are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detgen import Engine
from detgen.engine.request import Request
from detgen.errors import PromptsError
from detgen.params import SamplingParams
from detgen.prompts import open_prompts
from detgen.verify.perturb.axes import Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import FULL, QUICK, left_out, read_pool, repeated, shortened, with_calls
from detgen.verify.perturb.result import Case
from detgen.verify.replay.reading import refusal

LONG = "def add_all(numbers, start=0, *, key=None, reverse=False):\n    "
CHAT = [{"role": "user", "content": "Write a function that adds."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Add two numbers."}]}]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Pool]:
    """The pool of some lines."""

    def read(*lines: object, limit: int | None = None) -> Pool:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return read_pool(str(path), None, limit, QUICK)

    return read


def test_prompts_are_as_they_are(read: Callable[..., Pool]) -> None:
    """Whole, chats as chats, with the parameters that lines set; nothing is repeated."""
    sampled = {"temperature": 0.8, "seed": 4, "n": 2, "stop": ["\n\n"], "max_tokens": 90}
    pool = read(
        {"prompt": "x = 1\n"},
        {"prompt": LONG, **sampled},
        {"messages": CHAT, "max_tokens": 7},
        {"prompt_token_ids": [3, 4, 5]},
    )
    first, second, chat, ids = pool.requests
    assert first.prompt == "x = 1\n"
    assert second.prompt == LONG
    assert second.params == SamplingParams(max_tokens=90, temperature=0.8, seed=4, n=2, stop=("\n\n",))
    assert (chat.prompt, chat.messages, chat.params) == (None, CHAT, SamplingParams(max_tokens=7))
    assert ids.token_ids == (3, 4, 5)
    assert [r.id for r in pool.requests] == [1, 2, 3, 4], "their lines"
    assert (pool.given, pool.errors) == (4, [])
    assert pool.watched(Setting(batch="all"))[:4] == pool.requests


def test_a_line_without_a_number_of_tokens_has_that_of_the_check(read: Callable[..., Pool]) -> None:
    pool = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "min_tokens": 30}, {"prompt": "d", "max_tokens": 300})
    assert [r.params.max_tokens for r in pool.requests] == [24, 8, 30, 300]


def test_neighbours_say_what_messages_say(read: Callable[..., Pool]) -> None:
    """Not how Python shows a list or a dict."""
    pool = read({"messages": CHAT}, {"messages": PARTS})
    said = "Write a function that adds.\nAdd two numbers."
    assert len(pool.long) == QUICK.longest
    assert (said * 20).startswith(pool.long)


def test_no_more_than_a_check_takes(read: Callable[..., Pool]) -> None:
    lines = [{"prompt": f"x = {i}\n"} for i in range(FULL.prompts + 4)]
    pool = read(*lines)
    assert (len(pool.requests), pool.given) == (QUICK.prompts, FULL.prompts + 4)
    assert [r.prompt for r in read(*lines, limit=5).requests] == [line["prompt"] for line in lines[:5]]


def test_lines_that_cannot_be_checked_are_named(read: Callable[..., Pool]) -> None:
    pool = read({"prompt": "a"}, '{"prompt": ', {"prompt": "b", "deterministic": False}, {"prompt": "c", "n": 0})
    assert [r.prompt for r in pool.requests] == ["a"]
    assert [error.split(": ")[0] for error in pool.errors] == [f"prompts.jsonl:{line}" for line in (2, 3, 4)]
    assert pool.errors[1] == "prompts.jsonl:3: asks not to be verified"
    with pytest.raises(PromptsError, match=r"prompts\.jsonl:1: not valid JSON"):
        read('{"prompt": ')


def test_what_is_left_out_in_words() -> None:
    assert left_out([], 3) == []
    head, *lines = left_out([f"p.jsonl:{n}: too long" for n in range(1, 6)], 9)
    assert head == "5 of 9 prompts could not be run and were left out:"
    assert lines == [*(f"  p.jsonl:{n}: too long" for n in (1, 2, 3)), "  2 more"]


def test_some_embedded_prompts_have_forms_and_call_tools(
    pool: Pool, make_check: Callable[..., Check], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the chat template has calls; what they call is the same under settings that change all else."""
    asked = [
        [r.params.guided_json, r.params.guided_regex, r.params.guided_grammar, *r.params.guided_choice]
        for r in read_pool(None, None, None, QUICK).requests
    ]
    assert sum(any(forms) for forms in asked) > 12

    def can_run(request: Request) -> bool:
        return refusal(engine, request) is None

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
        assert with_calls(pool.requests, can_run) == pool.requests
    pool.requests = with_calls(pool.requests, can_run)
    calling = [r.with_params(max_tokens=24) for r in pool.requests if r.tools]
    assert len(calling) == 1
    pool.requests[3:4] = calling
    check = make_check(pool)
    check.learn()
    assert engine.tokenizer.decode(pool.tokens[calling[0].id]).startswith('<tool_call>\n{"name": "look_up", ')
    for setting in (
        Setting(batch="all", drafter="adversary", draft_tokens=4, neighbours="others"),
        Setting(batch=3, drafter="oracle", draft_tokens=7, sampling="T=0.8 penalties", order="reversed"),
    ):
        assert check.attempt(Case(setting, pool.watched(setting))) is None


def test_few_prompts_are_repeated_to_make_batches(read: Callable[..., Pool]) -> None:
    many = read(*({"prompt": f"x = {i}"} for i in range(5))).requests
    assert repeated(many) == many
    assert [r.prompt for r in repeated(many[:3])] == ["x = 0", "x = 1", "x = 2", "x = 0"]
    copies = repeated(many[:1])
    assert len({r.id for r in copies}) == len({r.index for r in copies}) == 4


def test_shortened(read: Callable[..., Pool]) -> None:
    many = read({"prompt": "a", "max_tokens": 50, "min_tokens": 40}, {"prompt": "b", "max_tokens": 3}, "x").requests
    assert [(r.params.max_tokens, r.params.min_tokens) for r in shortened(many, 2, 10)] == [(10, 10), (3, 0)]


def test_the_reference_is_what_a_run_writes(
    read: Callable[..., Pool], make_check: Callable[..., Check], engine: Engine, tmp_path: Path
) -> None:
    """Text and chat, greedy and sampled; a prompt that the model cannot run is named and left out."""
    pool = read(
        {"prompt": LONG, "max_tokens": 12, "temperature": 0.9, "seed": 3},
        {"messages": CHAT, "max_tokens": 9},
        {"prompt": "x " * 3000},
    )
    check = make_check(pool)
    check.learn()
    lines: Any = open_prompts(str(tmp_path / "prompts.jsonl")).read(SamplingParams(), 2)
    written = {
        done.request.line: done.token_ids for done in engine.generate([r for r in lines if isinstance(r, Request)])
    }
    assert {id: tokens for id, tokens in pool.tokens.items() if id in (1, 2)} == written
    assert [r.id for r in pool.requests] == [1, 2, "copy 1", "copy 2"]
    head, line = check.result.notes
    assert head == "1 of 3 prompts could not be run and were left out:"
    assert line.startswith("  prompts.jsonl:3: the prompt has ")
    for setting in (Setting(batch=3, drafter="ngram", draft_tokens=3), Setting(batch=2, sampling="stop")):
        assert check.attempt(Case(setting, pool.watched(setting))) is None
