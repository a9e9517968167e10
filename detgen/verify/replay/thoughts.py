"""The thoughts of an output line beside those that its tokens give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Claims = list[tuple[int, str]]  # first token of the chunk, text


def claims_of(value: Any) -> Claims | None:
    """What an output line says of thoughts; None if no run says it so."""
    if not isinstance(value, list):
        return None
    for entry in value:
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str)):
            return None
    return [(first, text) for first, text in value]


def possible(claims: Claims, chunk: int, read: int) -> bool:
    """Whether thoughts are those of full chunks among so many tokens, each once and in order."""
    firsts = [first for first, _ in claims]
    return firsts == sorted(set(firsts)) and all(f % chunk == 0 and 0 <= f <= read - chunk for f in firsts)


def wrong_thoughts(claims: Claims, thoughts: Claims) -> Iterator[str]:
    """What is wrong, missing or too much, in words.

    Args:
        claims: of the output line.
        thoughts: what the model thinks, in order.
    """
    if claims == thoughts:
        return
    said, given = dict(reversed(claims)), dict(thoughts)
    for first in sorted(said.keys() | given.keys()):
        where = f"the chunk at position {first}"
        if first not in said:
            yield f"the thought {given[first]!r:.80} of {where} is missing"
        elif first not in given:
            yield f"{where} thinks nothing, the thought {said[first]!r:.80} is made up"
        elif said[first] != given[first]:
            yield f"the thought of {where} is {said[first]!r:.80}, its tokens give {given[first]!r:.80}"
    firsts = [first for first, _ in claims]
    if firsts != sorted(set(firsts)):
        yield "the thoughts are not one a chunk in the order of the text"
