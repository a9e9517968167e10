"""How texts become tokens that are scored: each once, in windows that the model has room for."""

from __future__ import annotations

import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.scored import completion_tokens, move_space, rolling_windows


@examples(200)
@given(length=st.integers(1, 60), context=st.integers(1, 20))
def test_windows(length: int, context: int) -> None:
    """Each token is scored once, in order, behind what really comes before it, and as much of that as there is room
    for: in the first window the prefix, in others at least one token.
    """
    tokens = list(range(100, 100 + length))
    windows = list(rolling_windows(tokens, 7, context))
    assert [t for w in windows for t in w.tokens[-w.scored :]] == tokens
    assert len(windows) == -(-length // context)
    text, done = [7, *tokens], 0
    for window in windows:
        done += window.scored
        assert 0 < window.scored <= context
        assert window.tokens == text[done + 1 - len(window.tokens) : done + 1]
        assert len(window.tokens) - 1 == min(context, done), "all that is read fits, and nothing that would is left out"


@pytest.mark.parametrize(
    ("prompt", "completion", "moved"),
    [
        ("a", "b", ("a", "b")),
        ("a ", "b", ("a", " b")),
        ("a \n\t", " b", ("a", " \n\t b")),
        (" a b", "c", (" a b", "c")),
        ("a\u00a0", "b", ("a", "\u00a0b")),
    ],
)
def test_white_space_moves(prompt: str, completion: str, moved: tuple[str, str]) -> None:
    assert move_space(prompt, completion) == moved


def test_a_completion_has_what_the_prompt_has_not() -> None:
    """As many tokens as the prompt has alone are its own, also where the two of them join into other tokens."""

    def encode(text: str) -> list[int]:
        return [len(word) for word in text.replace("ab", "ab|").split("|") if word]

    assert completion_tokens("ab", encode("ab"), "ab|c", encode) == [2, 1]
    assert completion_tokens("a", encode("a"), "b|c", encode) == [1]
    assert completion_tokens("a", encode("a"), "b", encode) == []
