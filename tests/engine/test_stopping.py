"""When a sequence ends: stop strings, special tokens and length, whatever windows its tokens come in."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from detgen.engine.request import Request
from detgen.engine.sequence import Sequence
from detgen.engine.stopping import Stopping
from detgen.params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(demo_models: Any) -> Any:
    return AutoTokenizer.from_pretrained(demo_models.target)


@pytest.fixture(scope="module")
def stopping(tokenizer: Any) -> Stopping:
    return Stopping(tokenizer)


def sequence(
    stop: tuple[str, ...] = (), remaining: int = 1000, eos: frozenset[int] = frozenset(), **params: Any
) -> Sequence:
    prompt = [7, 8, 9]
    request = Request(0, 0, token_ids=tuple(prompt), params=SamplingParams(max_tokens=remaining, stop=stop, **params))
    return Sequence(request, 0, prompt, 3, 3 + remaining, eos)


def feed(stopping: Stopping, seq: Sequence, tokens: list[int], widths: list[int]) -> Sequence:
    """Commit tokens in windows of the given widths, repeated, until the sequence ends."""
    at, turn = 0, 0
    while at < len(tokens) and seq.finish_reason is None:
        pending: list[int] = []
        for token in tokens[at : at + widths[turn % len(widths)]]:
            pending.append(token)
            if stopping.ends(seq, pending):
                break
        seq.tokens += pending
        at += len(pending)
        turn += 1
    seq.text = stopping.text(seq)
    return seq


def test_a_stop_string_across_tokens(tokenizer: Any, stopping: Stopping) -> None:
    """The text ends before it; the tokens that complete it are committed, those behind it are not."""
    text = "def f(a, b):\n    return a + b\n\n\ndef g():\n    pass\n"
    ids = tokenizer(text).input_ids
    for stop in ("\n\ndef", "return a", "rn a + b\n\n", "): ", ":\n    pa", "d", text[-1]):
        seq = feed(stopping, sequence((stop,)), ids, [1])
        if stop in text:
            assert seq.finish_reason == "stop"
            assert seq.text == text[: text.index(stop)]
            assert stop in tokenizer.decode(seq.tokens[3:])
            assert stop not in tokenizer.decode(seq.tokens[3:-1])
        else:
            assert seq.finish_reason is None
            assert seq.text == text


def test_the_first_of_several(tokenizer: Any, stopping: Stopping) -> None:
    """Of several stop strings the text ends before the earliest, also if one token completes two."""
    ids = tokenizer("alpha beta gamma delta").input_ids
    assert feed(stopping, sequence(("delta", "gamma", "a b")), ids, [1]).text == "alph"
    assert feed(stopping, sequence(("zzz", "gamma", "amm")), ids, [1]).text == "alpha beta "


def test_a_stop_string_in_the_prompt_does_not_count(tokenizer: Any, stopping: Stopping) -> None:
    """Only the completion is searched, and a string half in the prompt is none."""
    prompt = tokenizer("print('a").input_ids
    params = SamplingParams(max_tokens=100, stop=("print", "a')"))
    seq = Sequence(Request(0, 0, token_ids=tuple(prompt), params=params), 0, list(prompt), len(prompt), 200)
    feed(stopping, seq, tokenizer("')\nx = 1\n").input_ids, [1])
    assert seq.finish_reason is None


def test_end_of_sequence(tokenizer: Any, stopping: Stopping) -> None:
    """The token ends the sequence, is committed, and does not show in the text."""
    ids = tokenizer("x = 1\n").input_ids
    seq = feed(stopping, sequence(eos=frozenset({tokenizer.eos_token_id})), [*ids, tokenizer.eos_token_id, *ids], [4])
    assert seq.finish_reason == "stop"
    assert seq.tokens[3:] == [*ids, tokenizer.eos_token_id]
    assert seq.text == "x = 1\n"


def test_a_stop_token(tokenizer: Any, stopping: Stopping) -> None:
    """It ends the sequence and is committed; the text ends before it."""
    ids = tokenizer("one two three").input_ids
    for widths in ([1], [2], [7]):
        seq = feed(stopping, sequence(stop_token_ids=(4000, ids[2])), ids, widths)
        assert (seq.finish_reason, seq.tokens[3:]) == ("stop", ids[:3])
        assert seq.text == tokenizer.decode(ids[:2])


def test_an_ignored_end_of_sequence(tokenizer: Any, stopping: Stopping) -> None:
    """It is a token like others, unless it is a stop token too."""
    ids = [*tokenizer("x = 1\n").input_ids, tokenizer.eos_token_id, *tokenizer("y").input_ids]
    eos = frozenset({tokenizer.eos_token_id})
    seq = feed(stopping, sequence(eos=eos, ignore_eos=True), ids, [4])
    assert (seq.finish_reason, seq.tokens[3:]) == (None, ids)
    seq = feed(stopping, sequence(eos=eos, ignore_eos=True, stop_token_ids=tuple(eos)), ids, [4])
    assert (seq.finish_reason, seq.text) == ("stop", "x = 1\n")


def test_least_tokens(tokenizer: Any, stopping: Stopping) -> None:
    """A stop string that ends within the text of the first `min_tokens` tokens does not count, a later one does."""
    text = "a = 1\nb = 2\nc = 3\nd = 4\n"
    ids = tokenizer(text).input_ids
    for least in range(len(ids)):
        held = tokenizer.decode(ids[:least])
        for stop in ("\n", " = ", "\nb", "= 2\nc"):
            want = next((i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > len(held)), None)
            for widths in ([1], [3], [50]):
                seq = feed(stopping, sequence((stop,), min_tokens=least), ids, widths)
                assert seq.text == text[:want]
                assert seq.finish_reason == (None if want is None else "stop")
                assert want is None or len(seq.tokens) - 3 > least


def test_least_tokens_and_a_stop_token(tokenizer: Any, stopping: Stopping) -> None:
    """The first one that ends the sequence comes behind them."""
    ids = tokenizer("one two three").input_ids
    seq = feed(stopping, sequence(stop_token_ids=(ids[0],), min_tokens=2), [*ids[:1] * 4, *ids], [1])
    assert (seq.finish_reason, seq.tokens[3:]) == ("stop", ids[:1] * 3)


def test_least_tokens_that_end_within_a_character(tokenizer: Any, stopping: Stopping) -> None:
    """A character whose last byte comes later is not in their text yet."""
    ids = tokenizer("a 🎉 b").input_ids
    at = next(n for n in range(1, len(ids)) if "🎉" in tokenizer.decode(ids[: n + 1]))
    assert "\ufffd" in tokenizer.decode(ids[:at]), "the emoji is several tokens"
    assert feed(stopping, sequence(("🎉",), min_tokens=at), ids, [1]).text == "a "
    assert feed(stopping, sequence(("🎉",), min_tokens=at + 1), ids, [1]).finish_reason is None


def test_length(tokenizer: Any, stopping: Stopping) -> None:
    """The limit ends it with `length`; a stop string completed by the very last token, with `stop`."""
    ids = tokenizer("one two three four five").input_ids
    for widths in ([1], [2], [5], [100]):
        seq = feed(stopping, sequence(remaining=4), ids, widths)
        assert (seq.finish_reason, seq.tokens[3:]) == ("length", ids[:4])
    last = tokenizer.decode(ids[:4])[-2:]
    seq = feed(stopping, sequence((last,), remaining=4), ids, [3])
    assert seq.finish_reason == "stop"


def test_text_of_many_bytes(tokenizer: Any, stopping: Stopping) -> None:
    """Characters of several tokens: the string is found when its last byte is there, and not before."""
    text = "größer → 日本語 🎉 done"
    ids = tokenizer(text).input_ids
    for stop in ("ß", "→", "本語", "🎉", " 🎉 d"):
        seq = feed(stopping, sequence((stop,)), ids, [1])
        assert seq.finish_reason == "stop"
        assert seq.text == text[: text.index(stop)]
        assert stop not in tokenizer.decode(seq.tokens[3:-1])
    assert feed(stopping, sequence(("日語",)), ids, [1]).text == text


PIECES = ["\n", " ", "def", "ab", "ba", "a", "b", "é", "🎉", "    return", "日"]


@examples(60)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=25),
    stop=st.lists(
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), min_size=1, max_size=2, unique=True
    ),
    special=st.integers(0, 40),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    remaining=st.integers(1, 60),
)
def test_windows_do_not_matter(
    tokenizer: Any,
    stopping: Stopping,
    pieces: list[str],
    stop: list[str],
    special: int,
    widths: list[int],
    remaining: int,
) -> None:
    """The same end, reason and text in windows of any widths as token by token, which is as the text says."""
    ids = [t for piece in pieces for t in tokenizer(piece).input_ids]
    others = [t for t in tokenizer.all_special_ids if t != tokenizer.eos_token_id]
    if others:
        ids.insert(min(special, len(ids)), others[0])
    one = feed(stopping, sequence(tuple(stop), remaining), ids, [1])
    many = feed(stopping, sequence(tuple(stop), remaining), ids, widths)
    assert (one.tokens, one.finish_reason, one.text) == (many.tokens, many.finish_reason, many.text)

    for n in range(1, min(remaining, len(ids)) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if any(s in text for s in stop):
            assert one.finish_reason == "stop"
            assert one.tokens[3:] == ids[:n]
            assert one.text == text[: min(text.index(s) for s in stop if s in text)]
            return
    assert one.finish_reason == ("length" if len(ids) >= remaining else None)


def test_a_long_completion_with_long_tokens(tokenizer: Any, stopping: Stopping) -> None:
    """A stop string is found at the end of a long completion, behind tokens that have no text of their own."""
    filler = tokenizer("    return self.value\n").input_ids * 60
    special = [t for t in tokenizer.all_special_ids if t != tokenizer.eos_token_id][:1] * 30
    stop = tokenizer("END OF").input_ids
    ids = [*filler, *stop[:1], *special, *stop[1:], *filler]
    seq = feed(stopping, sequence(("END OF",), 5000), ids, [7])
    assert seq.finish_reason == "stop"
    assert len(seq.tokens) - 3 == len(filler) + len(stop) + len(special)
