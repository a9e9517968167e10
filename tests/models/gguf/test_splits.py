"""Texts are split as a file's vocabulary was made for."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from detgen.models.byte_letters import byte_letters
from detgen.models.gguf.splits import WAYS, take_texts


def test_splits_are_those_of_transformers() -> None:
    """As far as it knows them."""
    both = WAYS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(both) > 15
    assert {name: WAYS[name].splits for name in both} == {name: (GGUF_PRE_TOKENIZER_SPLITS[name],) for name in both}


# What the same entries become; of GPT-2's way, digits and words with a mark before them would be others.
TAKEN = {
    "gpt-2": ["x", "_", "ab", " ", " 12", "(", "ab", "'s"],
    "smollm": ["x", "_", "ab", " ", " ", "1", "2", "(", "ab", "'s"],
    "llama-bpe": ["x", "_ab", " ", " ", "12", "(ab", "'s"],
    "qwen2": ["x", "_ab", " ", " ", "1", "2", "(ab", "'s"],
    "deepseek-coder": ["x", "_", "ab", " ", " ", "1", "2", "(", "ab", "'", "s"],
}


@pytest.mark.parametrize("pre", TAKEN)
def test_texts_are_split_as_the_file_says(pre: str) -> None:
    """Also where a whole piece is an entry that no merges make."""
    entries = ["_a", "_ab", "ab", "(a", "(ab", "12", "Ġ12", "Ġ1", "'s"]
    merges = [("a", "b"), ("_", "ab"), ("(", "ab"), ("1", "2"), ("Ġ", "12"), ("'", "s")]
    letters = byte_letters()
    made = Tokenizer(BPE({x: i for i, x in enumerate([*letters, *entries])}, merges))
    take_texts(made, WAYS[pre])
    assert [x.replace("Ġ", " ") for x in made.encode("x_ab  12(ab's").tokens] == TAKEN[pre]
    whole = made.encode("_a").tokens == ["_a"]
    assert whole == WAYS[pre].whole


# Texts, and their pieces where another way would have others.
SPLIT = {
    "kimi-k2": ("Abか中文a's 1234  \n/x\n\n", ["Abか", "中文", "a's", " ", "123", "4", "  \n", "/x", "\n\n"]),
    "exaone-moe": ("ab cd 12, e/\n\n f", ["ab cd", " ", "1", "2", ",", " e", "/\n", "\n", " f"]),
    "jais-2": ("a       b 1234\n", ["a", "    ", "  ", " b", " ", "123", "4", "\n"]),
    "minicpm5": ("ab 12345x_y\n", ["ab", " ", "123", "45", "x", "_y", "\n"]),
    "afmoe": ("a1234567 12\u0e40x _y\n", ["a", "1", "234", "567", " ", "12", "\u0e40", "x", " _", "y", "\n"]),
}


@pytest.mark.parametrize("pre", SPLIT)
def test_pieces_of_texts(pre: str) -> None:
    letters = byte_letters()
    made = Tokenizer(BPE({x: i for i, x in enumerate(letters)}, []))
    take_texts(made, WAYS[pre])
    text, pieces = SPLIT[pre]
    assert made.pre_tokenizer is not None
    found = made.pre_tokenizer.pre_tokenize_str(text)
    assert [bytes(letters.index(letter) for letter in piece).decode() for piece, _ in found] == pieces
