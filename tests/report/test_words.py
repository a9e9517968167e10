"""Texts in which nothing is hidden, and counts."""

from __future__ import annotations

import json

from detgen.report.words import counted, harmless, text_of, visible


def test_nothing_is_hidden() -> None:
    hidden = "a\x1b[31m\u202e\u200b\x00\ud800\u2028\n\t\r"
    assert visible(hidden) == r"a\x1b[31m\u202e\u200b\x00\ud800\u2028↵⇥␍"
    assert harmless(hidden) == "a\\x1b[31m\\u202e\\u200b\\x00\\ud800\\u2028\n\t\\r"
    assert visible("naïve 硬币 😀") == "naïve 硬币 😀"
    assert json.loads(json.dumps(visible(hidden)).encode()) == visible(hidden)


def test_one_is_not_several() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 1000)] == ["0 tokens", "1 token", "2 tokens", "1,000 tokens"]


def test_long_texts_are_cut() -> None:
    assert visible("a" * 1000) == "a" * 1000
    assert visible("a" * 1001) == "a" * 999 + "…"
    assert text_of("a\n" * 10_000) == "a\n" * 10_000
    assert text_of("a" * 20_001) == "a" * 20_000 + "\n[1 more characters]"
    assert text_of([{"role": "user"}]) == '[\n {\n  "role": "user"\n }\n]'
