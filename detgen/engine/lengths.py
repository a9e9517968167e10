"""The least number of tokens that a long text can have, from its length alone.

No token stands for more than the longest entry of the vocabulary, so the length divided by the entry's is a lower
bound. It is sound only where nothing of the text gets lost on the way to the tokens: a tokenizer whose normalizers or
splitters may drop text, or that joins unknown characters into one token, gets no bound.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

_LETTERS = string.ascii_letters.encode()
_OTHERS = bytes(set(range(256)) - set(_LETTERS))
_COMPOSED = 4  # most characters that normalization joins into one
# Normalizers that join characters but never drop one, and leave ASCII alone or change its letters one by one.
_JOINING = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase"}
# Splitters that keep all of the text, unless their behaviour says otherwise.
_SPLITTERS = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts"}


class _Limits(NamedTuple):
    """What one token stands for at most, and how texts are measured.

    Attributes:
        size: bytes, or characters where the vocabulary is of characters.
        letters: ASCII letters.
        in_bytes: whether size counts bytes.
        joined: whether a normalizer may join characters that are not ASCII.
        stripped: whether an added token swallows the white space beside it.
    """

    size: int
    letters: int
    in_bytes: bool
    joined: bool
    stripped: bool


class LeastTokens:
    """Lower bounds of a tokenizer, whose state is read on first use.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _limits(self) -> _Limits | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _limits(json.loads(backend.to_str()))

    def of(self, text: str) -> int:
        """Tokens that the text has at least, special ones aside; 0 if nothing is known."""
        limits = self._limits
        if limits is None:
            return 0
        if limits.stripped:
            text = "".join(text.split())
        plain = text.isascii() or not limits.joined
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) if limits.in_bytes and plain else len(text)
        by_size = -(-size // (limits.size if plain else limits.size * _COMPOSED))
        letters = len(data.translate(None, _OTHERS)) if plain else 0
        return max(by_size, -(-letters // limits.letters))


def _limits(state: dict[str, Any]) -> _Limits | None:
    """The limits of a tokenizer's state, as tokenizer.json has it; None if there is no sound bound."""
    normalizers, splitters = _parts(state["normalizer"], "normalizers"), _parts(state["pre_tokenizer"], "pretokenizers")
    if not all(_keeps(n) for n in normalizers) or not all(_splits(s) for s in splitters):
        return None
    in_bytes = any(s["type"] == "ByteLevel" for s in splitters)
    vocabulary = _vocabulary(state["model"], in_bytes)
    if vocabulary is None:
        return None
    added = [token["content"] for token in state["added_tokens"]]
    measure: Callable[[str], int] = (lambda token: len(token.encode())) if in_bytes else len
    letters = (len(t.encode().translate(None, _OTHERS)) for t in (*vocabulary, *added))
    return _Limits(
        size=max(*map(len, vocabulary), *map(measure, added), 1),
        letters=max(1, *letters),
        in_bytes=in_bytes,
        joined=any(n["type"] in _JOINING for n in normalizers),
        stripped=any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]),
    )


def _parts(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A part of the state, with sequences unfolded."""
    if part is None:
        return []
    return [p for each in part[inner] for p in _parts(each, inner)] if part["type"] == "Sequence" else [part]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Whether it drops nothing, and no ASCII letter."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return old is not None and len(new) >= len(old) and not set(old) & set(string.ascii_letters)
    return normalizer["type"] in _JOINING | {"Prepend"}


def _splits(splitter: dict[str, Any]) -> bool:
    """Whether it drops nothing."""
    return splitter["type"] in _SPLITTERS and splitter.get("behavior") != "Removed"


def _vocabulary(model: dict[str, Any], in_bytes: bool) -> Iterable[str] | None:
    """The entries of a model to which no text is unknown; None of another."""
    entries = model.get("vocab")
    if model.get("type") == "Unigram" and isinstance(entries, list):
        known: set[str] = {entry[0] for entry in entries}
    elif model.get("type") == "BPE" and isinstance(entries, dict):
        known = set(entries)
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
    else:
        return None
    if in_bytes:
        return known if known.issuperset(ByteLevel.alphabet()) else None
    whole = model.get("byte_fallback") and known.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    return known if whole else None
