"""A sample survives the way into a store and back, and so do its lines."""

from __future__ import annotations

import math
import random
import struct
import zlib
from dataclasses import fields, replace
from typing import get_args

import pytest
from helpers.completions import NUMBERED, completion, request
from helpers.examples import examples
from helpers.records import count_records
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.answer import Answer, ToolCall
from detgen.engine.request import Completion, Status, Thought, TokenLogprobs, TokenRecord
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.outputs.lines import acceptance_lines, output_line
from detgen.outputs.samples import counts_of, pack, unpacked

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
    calls = st.lists(st.builds(ToolCall, _texts, _texts), max_size=2).map(tuple)
    answer = draw(st.none() | st.builds(Answer, st.none() | _texts, st.none() | _texts, calls))
    head = request(3, n=2), 1, draw(_texts), tokens, reason, draw(_tokens), logprobs, tuple(records), counts
    return Completion(*head, thoughts, answer=answer)


@examples(100)
@given(made=completions())
def test_a_completion_comes_back_with_the_same_lines(made: Completion) -> None:
    other = replace(request(8), id="other", metadata={"k": 1})
    back = unpacked(pack(made), other, 0)
    expected = replace(made, request=other, sample=0)
    assert isinstance(back, Completion)
    assert output_line(back, NUMBERED) == output_line(expected, NUMBERED)
    assert acceptance_lines(back) == acceptance_lines(expected)
    assert back.drafts == made.drafts
    assert list(back.drafts) == list(made.drafts)
    assert repr((back.token_ids, back.logprobs)) == repr((made.token_ids, made.logprobs))


_scores = st.lists(st.tuples(_tokens, st.floats(max_value=0, width=32, allow_nan=False), st.booleans()), max_size=9)


@examples(50)
@given(made=_scores, error=st.none() | _texts)
def test_so_does_a_score(made: list[tuple[int, float, bool]], error: str | None) -> None:
    tokens, logprobs, greedy = (tuple(column) for column in zip(*made, strict=True)) if made else ((), (), ())
    asked = ScoreRequest(0, "a", prompt="x", completions=("y", "z"))
    score = Score(asked, 1, tokens, logprobs, greedy, 3, error or None)
    back = unpacked(pack(score), asked, 1)
    assert repr(back) == repr(score)
    assert back is not None
    assert output_line(back, NUMBERED) == output_line(score, NUMBERED)


def test_so_does_an_error() -> None:
    made = Completion(request(0), 1, finish_reason="error", prompt_tokens=3, error="the logits are not finite")
    back = unpacked(pack(made), made.request, 1)
    assert back == made


def test_every_field_of_a_sample_comes_back() -> None:
    """Also one that is new: what is plain goes by its name."""
    made = replace(
        completion(request(0)), thoughts=(Thought(1, (), "t"),), logprobs=(TokenLogprobs(-1.5, ((3, -1.5),)),)
    )
    back = unpacked(pack(made), made.request, made.sample)
    assert isinstance(back, Completion)
    for each in fields(Completion):
        assert getattr(back, each.name) == getattr(made, each.name), each.name


def test_a_token_takes_a_few_bytes() -> None:
    """A line of the acceptance log has some 140."""
    draw = random.Random(1)
    tokens = [draw.randrange(4096) for _ in range(500)]
    scores = [struct.unpack("f", struct.pack("f", -draw.expovariate(1)))[0] for _ in range(1000)]
    made = tuple(TokenRecord(i, i, t, "none", None, "plain", *scores[2 * i : 2 * i + 2]) for i, t in enumerate(tokens))
    whole = replace(completion(request(0)), token_ids=tuple(tokens), records=made)
    assert len(pack(whole)) < 16 * len(tokens)


def test_half_a_character_is_kept() -> None:
    made = replace(completion(request(0)), text="\ud800 \u2028 \x00")
    back = unpacked(pack(made), made.request, 0)
    assert isinstance(back, Completion)
    assert back.text == made.text


def test_counts_begin_anew_with_each_round() -> None:
    made = [TokenRecord(i, i // 2, 1, "none", None, "plain", 0.0, None) for i in range(5)]
    assert counts_of(made)["none"].rounds == 3
    assert counts_of([]) == {}


@pytest.mark.parametrize(
    "head",
    ["[]", "{}{", '{"unknown": 1}', '{"records": 3}', '{"token_ids": 3}', '{"logprobs": [1]}', '{"thoughts": [1]}'],
)
def test_other_bytes_are_none(head: str) -> None:
    assert unpacked(zlib.compress(head.encode()), request(0), 0) is None


def test_bytes_that_are_cut_are_none() -> None:
    data = pack(completion(request(0)))
    assert unpacked(b"", request(0), 0) is None
    for size in range(len(data)):
        assert unpacked(data[:size], request(0), 0) != completion(request(0))
