"""A text in chunks, with the states and thoughts that belong to each."""

from __future__ import annotations

from detgen.engine.chunks import Chunk, chunks_of


def _decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_a_state_stays_or_is_emptied() -> None:
    """It is that of the last thought, from the next chunk on; or of the chunk before alone."""
    tokens, thoughts = list(range(11)), {0: "a", 6: "b"}
    kept = chunks_of(tokens, thoughts, 3, _decode, keeps=True)
    assert kept == [
        Chunk(0, 3, "0 1 2", None, "a"),
        Chunk(3, 6, "3 4 5", "a", None),
        Chunk(6, 9, "6 7 8", "a", "b"),
        Chunk(9, 11, "9 10", "b", None),
    ]
    assert [c.state for c in chunks_of(tokens, thoughts, 3, _decode, keeps=False)] == [None, "a", None, "b"]


def test_a_thought_without_text_is_one() -> None:
    """A thought of special tokens alone decodes to nothing."""
    assert [c.state for c in chunks_of([1, 2, 3], {0: "", 1: "x"}, 1, _decode, keeps=True)] == [None, "", "x"]
