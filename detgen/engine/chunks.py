"""A text in the chunks in which a thinking model reads it, with states and thoughts in words. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of prompt and completion.

    Attributes:
        first: position of its first token, from 0.
        end: the position behind its last token.
        text: its tokens'.
        state: the thought whose state was added to its rows; None for the zero state.
        thought: what the model thought after it; None for nothing, and for the last, partial chunk.
    """

    first: int
    end: int
    text: str
    state: str | None
    thought: str | None


def chunks_of(
    tokens: list[int], thoughts: Mapping[int, str], size: int, decode: Callable[[list[int]], str], *, keeps: bool
) -> list[Chunk]:
    """Divide a text as the model read it.

    Args:
        tokens: prompt and completion.
        thoughts: what was thought, by the position of the chunk's first token.
        size: tokens of a chunk.
        decode: the text of tokens.
        keeps: whether a state stays until the next thought; else it is zero after a chunk that thought nothing.
    """
    found: list[Chunk] = []
    state = None
    for first in range(0, len(tokens), size):
        part, thought = tokens[first : first + size], thoughts.get(first)
        found.append(Chunk(first, first + len(part), decode(part), state, thought))
        state = thought if thought is not None or not keeps else state
    return found
