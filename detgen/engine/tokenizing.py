"""Turns texts into token ids, within bounds, since a tokenizer.json may be a stranger's.

A regular expression can run forever, and a normalizer can make gigabytes from a line. Tokenizers made only of parts
that are known to take time and memory in proportion to their text are called in this process, at no cost; others in a
copy of it, like chat templates (`detgen/engine/bounded.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from detgen.engine.bounded import Bounded
from detgen.engine.rendering import shortened
from detgen.errors import EngineError, RequestError

_LARGEST = 8192  # bytes of a part's settings
_MODELS = {"BPE", "Unigram"}
_NORMALIZERS = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "Strip", "StripAccents"}
_SPLITTERS = {"ByteLevel", "Digits", "Punctuation", "Metaspace", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_ENDINGS = {"ByteLevel", "BertProcessing", "RobertaProcessing"}
_SHORT = 8  # characters

# Regular expressions of well-known tokenizers, which go through a text once. For other ones, this is hard to tell.
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SIGNS, _SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset(
    "|".join(parts)
    for parts in (
        # GPT-2
        (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
        # Llama 3
        (_ENDS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", _SIGNS, _SPACES),
        # Qwen 2 and 3, Qwen 3.5
        (_ENDS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", _SIGNS, _SPACES),
        (_ENDS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES),
        # Mistral
        (_LOWER, _UPPER, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES),
        # GPT-4o, Llama 4
        (f"{_LOWER}{_ENDS}?", f"{_UPPER}{_ENDS}?", r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES),
        # DeepSeek, one after the other
        (r"\p{N}{1,3}",),
        (r"[一-龥぀-ゟ゠-ヿ]+",),
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _SPACES,
        ),
        # The embedded models
        (r"\n+| {2,}|[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s",),
    )
)


class Tokenize:
    """Tokenizes texts.

    Args:
        tokenizer: a tokenizer of transformers.
        model: name of the model in errors.
    """

    def __init__(self, tokenizer: Any, model: str) -> None:
        def call(text: str, special: bool) -> list[int]:
            return list(tokenizer(text, add_special_tokens=special).input_ids)

        self._model = model
        self._call: Callable[[str, bool], list[int]] = (
            call if _is_known(tokenizer) else Bounded(call, least=lambda text, special: (("a", special), {}))
        )

    def __call__(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, with or without the special tokens that the tokenizer adds.

        Raises:
            RequestError: if the tokenizer takes too long or too much memory, or fails.
            EngineError: if the machine has no room to tokenize the text.
        """
        try:
            return self._call(text, special)
        except (EngineError, MemoryError):
            raise
        except Exception as error:  # a tokenizer may raise anything
            raise RequestError(f"the tokenizer of {self._model} fails on this text: {shortened(error)}") from error


def _is_known(tokenizer: Any) -> bool:
    """Return whether a tokenizer consists of known parts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ not in _MODELS:
        return False
    affixes = (getattr(backend.model, name, None) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    if any(len(affix or "") > _SHORT for affix in affixes):
        return False
    states = [
        b"null" if part is None else part.__getstate__()
        for part in (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    ]
    if max(map(len, states)) > _LARGEST:
        return False
    normalizers, splitters, endings = map(_unfolded, map(json.loads, states))
    return all(map(_keeps_size, normalizers)) and all(map(_splits_once, splitters)) and all(map(_adds_few, endings))


def _unfolded(part: Any) -> list[dict[str, Any]]:
    """Return a part of a tokenizer's state as a list, with sequences expanded."""
    if part is None:
        return []
    inner = next((value for value in part.values() if isinstance(value, list)), [])
    return [p for each in inner for p in _unfolded(each)] if part["type"] == "Sequence" else [part]


def _keeps_size(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Prepend":
        return len(normalizer["prepend"]) <= _SHORT
    if normalizer["type"] == "Replace":
        return 0 < len(normalizer["pattern"].get("String", "")) >= len(normalizer["content"])
    return normalizer["type"] in _NORMALIZERS


def _splits_once(splitter: dict[str, Any]) -> bool:
    if splitter["type"] == "Split":
        pattern = splitter["pattern"]
        return bool(pattern.get("String")) or pattern.get("Regex") in PATTERNS
    return splitter["type"] in _SPLITTERS


def _adds_few(ending: dict[str, Any]) -> bool:
    if ending["type"] == "TemplateProcessing":
        return sum("Sequence" in piece for piece in ending["single"]) == 1
    return ending["type"] in _ENDINGS
