"""A completion survives the way into a cache and back, and so do its lines."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from typing import get_args

import pytest
from helpers.completions import completion, request
from helpers.examples import examples
from helpers.records import count_records
from hypothesis import given
from hypothesis import strategies as st

from detgen.cache.packed_values import counts_of, pack, pack_lines, unpack
from detgen.engine.request import Completion, Status, Thought, TokenLogprobs, TokenRecord
from detgen.outputs.lines import acceptance_lines, output_line

_tokens = st.integers(0, 2**31)
_logits = st.floats(width=32) | st.sampled_from([-0.0, 5e-324, math.pi])
_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
_rounds = st.lists(
    st.tuples(
        st.sampled_from(["none", "ngram", "model"]),
        st.lists(st.sampled_from(get_args(Status)), min_size=1, max_size=4),
    ),
    max_size=4,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Any completion: one drafter to a round, as the engine has it."""
    records = []
    for number, (drafter, statuses) in enumerate(draw(_rounds)):
        for status in statuses:
            token = None if status == "rolled_back" else draw(_tokens)
            drafted = draw(_tokens) if status in ("accepted", "corrected", "rolled_back") else None
            margin = draw(st.none() | _logits)
            records.append(TokenRecord(len(records), number, token, drafter, drafted, status, draw(_logits), margin))
    tokens = tuple(record.token for record in records if record.token is not None)
    logprobs = None
    if draw(st.booleans()):
        tops = st.lists(st.tuples(_tokens, _logits), max_size=2).map(tuple)
        logprobs = tuple(TokenLogprobs(draw(_logits), draw(tops)) for _ in tokens)
    thoughts = draw(st.none() | st.lists(st.builds(Thought, _tokens, st.just(()), _texts), max_size=2).map(tuple))
    reason = draw(st.sampled_from(["stop", "length"]))
    counts = count_records(records)
    return Completion(
        request(3, n=2), 1, draw(_texts), tokens, reason, draw(_tokens), logprobs, tuple(records), counts, thoughts
    )


@examples(100)
@given(made=completions())
def test_a_completion_comes_back_with_the_same_lines(made: Completion) -> None:
    other = replace(request(8), id="other", metadata={"k": 1})
    back = unpack(pack(made), other, 0)
    expected = replace(made, request=other, sample=0)
    assert output_line(back) == output_line(expected)
    assert acceptance_lines(back) == acceptance_lines(expected)
    assert back.drafts == made.drafts
    assert list(back.drafts) == list(made.drafts)
    assert repr((back.token_ids, back.logprobs)) == repr((made.token_ids, made.logprobs))


@examples(100)
@given(made=completions())
def test_so_does_one_that_is_made_of_its_lines(made: Completion) -> None:
    line = json.loads(output_line(made))
    records = [json.loads(raw) for raw in acceptance_lines(made).splitlines()]
    back = unpack(pack_lines(line, records), made.request, made.sample)
    assert output_line(back) == output_line(made)
    assert acceptance_lines(back) == acceptance_lines(made)
    assert back.drafts == made.drafts


def test_half_a_character_is_kept() -> None:
    made = replace(completion(request(0)), text="\ud800 \u2028 \x00")
    assert unpack(pack(made), made.request, 0).text == made.text


def test_counts_begin_anew_with_each_round() -> None:
    made = [TokenRecord(i, i // 2, 1, "none", None, "plain", 0.0, None) for i in range(5)]
    assert counts_of(made)["none"].rounds == 3
    assert counts_of([]) == {}


@pytest.mark.parametrize("data", [b"", b"x", pack(completion(request(0)))[:-5]])
def test_other_bytes_are_none(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, zlib.error)):
        unpack(data, request(0), 0)
