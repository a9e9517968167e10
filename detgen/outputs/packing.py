"""What a store keeps of a sample, as bytes: all that its lines need beside what they repeat of the request."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from detgen.engine.answer import Answer, ToolCall
from detgen.engine.request import Completion, Request, Thought, TokenLogprobs, TokenRecord
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import DraftCounts

_LEVEL = 1  # of compression: a third of the size, in less time than it takes to write the rest
_GIVEN = ("request", "sample", "drafts")  # known to whoever unpacks, or a function of the records
_WHOLE = TokenRecord._fields[:-2]  # columns of a record; the last two are floats
_NONE = math.nan  # no line has another, since it would be null, too

_MALFORMED = (ValueError, TypeError, AttributeError, struct.error, zlib.error, RecursionError)


def pack(sample: Completion | Score) -> bytes:
    """A sample, which may have ended with an error of its own."""
    values = {
        each.name: value
        for each in fields(sample)
        if each.name not in _GIVEN
        if (value := getattr(sample, each.name)) != each.default
    }
    floats: list[float] = []
    if isinstance(sample, Completion):
        if sample.logprobs is not None:
            values["logprobs"] = [(each.logprob, each.top) for each in sample.logprobs]
        if sample.thoughts is not None:
            values["thoughts"] = [(thought.first, thought.text) for thought in sample.thoughts]
        if sample.records:
            *whole, logprobs, margins = zip(*sample.records, strict=True)
            values["records"] = whole  # by columns, which are alike
            floats = [_NONE if value is None else value for value in (*logprobs, *margins)]
    elif sample.logprobs:
        floats = [*values.pop("logprobs")]
    head = zlib.compress(json.dumps(values, separators=(",", ":")).encode(), _LEVEL)
    return head + zlib.compress(_planes(struct.pack(f"<{len(floats)}d", *floats)), _LEVEL) if floats else head


def unpacked(data: bytes, request: Request, sample: int) -> Completion | Score | None:
    """The sample as one of a request's; its thoughts are without tokens, which no line has.

    None if the bytes are none of such a sample: their digest may be right and a stranger's.
    """
    try:
        return _unpacked(data, request, sample)
    except _MALFORMED:
        return None


def _unpacked(data: bytes, request: Request, sample: int) -> Completion | Score:
    parts = zlib.decompressobj()
    values: dict[str, Any] = json.loads(parts.decompress(data))
    plain = zlib.decompress(parts.unused_data) if parts.unused_data else b""
    floats = struct.unpack(f"<{len(plain) // 8}d", _planes(plain, len(plain) // 8))
    values["token_ids"] = tuple(values.get("token_ids", ()))
    if isinstance(request, ScoreRequest):
        values["greedy"] = tuple(values.get("greedy", ()))
        return Score(request, sample, logprobs=floats, **values)
    if "logprobs" in values:
        values["logprobs"] = tuple(TokenLogprobs(own, tuple(map(tuple, top))) for own, top in values["logprobs"])
    if "thoughts" in values:
        values["thoughts"] = tuple(Thought(first, (), text) for first, text in values["thoughts"])
    if "answer" in values:
        thought, content, calls = values["answer"]
        values["answer"] = Answer(thought, content, tuple(ToolCall(*call) for call in calls))
    known = [None if math.isnan(value) else value for value in floats]
    columns = [*values.pop("records", [[]] * len(_WHOLE)), known[: len(known) // 2], known[len(known) // 2 :]]
    records = tuple(map(TokenRecord._make, zip(*columns, strict=True)))
    return Completion(request, sample, records=records, drafts=counts_of(records), **values)


def counts_of(records: Sequence[TokenRecord]) -> DraftCounts:
    """The counts of a sample's records, drafters in the order in which they came, as the engine counts them."""
    counts, latest = DraftCounts(), None
    for record in records:
        counts[record.drafter].rounds += record.round != latest
        latest = record.round
    for (drafter, status), number in Counter((r.drafter, r.status) for r in records).items():
        stats = counts[drafter]
        setattr(stats, status, number)
        stats.drafted += number if status in ("accepted", "corrected", "rolled_back") else 0
    return counts


def _planes(data: bytes, step: int = 8) -> bytes:
    """Bytes of numbers, first bytes first; with the number of numbers as the step, the numbers again.

    Most of these are float32 numbers as float64 ones, whose last bytes are zero; so they take little room.
    """
    return b"".join(data[start::step] for start in range(step)) if data else data
