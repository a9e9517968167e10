"""What single tokens stand for: together the bytes of the text, for tokenizers of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from detgen.engine.pieces import Piece, Pieces, pieces_of
from detgen.models.byte_letters import byte_letters


def in_bytes() -> Any:
    """A vocabulary of bytes, as GPT-2 has it, with a token that ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|ende|>")


def in_characters() -> Any:
    """A vocabulary of characters with bytes for the rest, as Llama has it."""
    entries = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "\u2581", "a", "b", "\u2581a"]
    tokenizer = Tokenizer(
        models.BPE({e: i for i, e in enumerate(entries)}, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = (in_bytes, in_characters)


@pytest.mark.parametrize("make", KINDS)
@given(
    text=st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="\u2581")
        | st.sampled_from("ab \n\u20ac\U0001f600")
    )
)
@example(text="a b\u20ac\U0001f600")
@examples(50)
def test_the_pieces_of_a_text_are_its_bytes(make: Callable[[], Any], text: str) -> None:
    tokenizer = make()
    pieces = Pieces(lambda: tokenizer)
    found = [pieces.of(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
    assert b"".join(piece.data for piece in found) == text.encode()
    for piece in found:
        assert piece.whole == (piece.data.decode(errors="replace") == piece.text)


def test_a_part_of_a_character_is_shown_byte_by_byte() -> None:
    tokenizer = in_bytes()
    pieces = Pieces(lambda: tokenizer)
    tokens = tokenizer("\u20ac", add_special_tokens=False).input_ids
    assert [pieces.of(t) for t in tokens] == [
        Piece("\\xe2", b"\xe2", False),
        Piece("\\x82", b"\x82", False),
        Piece("\\xac", b"\xac", False),
    ]


def test_added_tokens_and_ids_without_a_token() -> None:
    tokenizer = in_bytes()
    pieces = Pieces(lambda: tokenizer)
    assert pieces.of(tokenizer.eos_token_id) == Piece("<|ende|>", b"<|ende|>", True)
    assert pieces.of(5000) == Piece("", b"", True)


def test_a_tokenizer_is_loaded_once_and_only_if_needed() -> None:
    loaded: list[Any] = []
    pieces = Pieces(lambda: loaded.append(in_bytes()) or loaded[-1])
    assert not loaded
    pieces.of(1), pieces.of(1), pieces.of(2)
    assert len(loaded) == 1


def test_the_embedded_tokenizer(demo_models: Any) -> None:
    text = "def f(x):\n        return '\u00e9\U0001f600'"
    for target in (None, demo_models.target, str(demo_models.target)):
        pieces = pieces_of(target)
        tokens = pieces._tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(pieces.of(t).data for t in tokens) == text.encode()


def test_the_letters_of_bytes_are_those_of_transformers() -> None:
    """And of the tokenizers library."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert dict(enumerate(byte_letters())) == bytes_to_unicode()
    assert set(byte_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
