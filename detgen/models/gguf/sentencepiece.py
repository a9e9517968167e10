"""SentencePiece's vocabularies in GGUF files, made into tokenizers as transformers does, but without it.

A file has the score of each piece. From the scores follows which two pieces are merged, and which first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

_SPACE = "\u2581"
_CONTENT = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
# Tokens with a special role, which are added if a vocabulary lacks them.
_LLAMAS, _GEMMAS = ("<s>", "</s>", "<unk>"), ("<bos>", "<eos>", "<unk>", "<pad>", "<mask>")


def pieces_made(
    architecture: str, tokens: Sequence[str], *, scores: Sequence[float] = (), merges: Sequence[str] = ()
) -> Tokenizer:
    """Return the tokenizer of a file, without the tokens that the file calls special.

    Args:
        architecture: the file's architecture.
        tokens: the pieces.
        scores: their scores.
        merges: pairs to merge, if the file has them.

    Raises:
        ValueError: if a score is not finite, or a merge is not a pair.
        Exception: from the tokenizers library, if it cannot make the tokenizer.
    """
    gemma = architecture.startswith("gemma")
    if gemma:  # whose files have spaces in place of the mark for them, and the order of pieces instead of scores
        tokens = [_SPACE * len(text) if " " in text and not text.strip() else text for text in tokens]
        scores = [-i for i in range(len(tokens))]
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    pairs = pairs_of(merges) if merges else _pairs_by(dict(zip(tokens, scores, strict=True)), vocabulary)
    unknown: dict[str, Any] = {"unk_token": "<unk>"} if gemma else {}
    made = Tokenizer(BPE(vocabulary, pairs, fuse_unk=True, byte_fallback=True, **unknown))
    if gemma:
        made.normalizer = normalizers.Replace(" ", _SPACE)
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence(_CONTENT)
    else:
        made.decoder = decoders.Sequence([*_CONTENT, decoders.Strip(" ", left=1)])
    if architecture == "phi3":
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    elif not gemma:
        made.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)
    made.add_tokens([AddedToken(text, special=True) for text in (_GEMMAS if gemma else _LLAMAS)])
    return made


def pairs_of(merges: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of pieces from a file's merges.

    Raises:
        ValueError: if a merge is not a pair.
    """
    return [(first, last) for first, last in (merge.split(" ") for merge in merges)]


def _pairs_by(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return pairs whose concatenation is a piece: by score, highest first, then by length of the first part.

    Raises:
        ValueError: if a score is not finite.
    """
    if not all(map(math.isfinite, scores.values())):
        raise ValueError("a score is no number")
    found = [
        (first, last)
        for text in sorted(scores, key=scores.__getitem__, reverse=True)
        for i in range(len(text) - 1, 0, -1)
        if (first := text[:i]) in vocabulary and (last := text[i:]) in vocabulary
    ]
    if len({*scores.values()}) < len(scores):  # else they are in order
        found.sort(key=lambda pair: (scores["".join(pair)], len(pair[0]), len(pair[1])), reverse=True)
    return found
