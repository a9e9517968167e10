"""What a cache keeps of a completion, as bytes: all that its lines need beside what they repeat of the request."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from detgen.engine.request import Completion, Request, Thought, TokenLogprobs, TokenRecord
from detgen.engine.stats import DraftCounts

_LEVEL = 1  # of compression: a third of the size, in less time than it takes to write the rest


def pack(completion: Completion) -> bytes:
    """A completion that is no error."""
    logprobs, thoughts = completion.logprobs, completion.thoughts
    return _bytes(
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.prompt_tokens,
        None if logprobs is None else [(each.logprob, each.top) for each in logprobs],
        None if thoughts is None else [(thought.first, thought.text) for thought in thoughts],
        completion.records,
    )


def pack_lines(line: dict[str, Any], records: Iterable[dict[str, Any]]) -> bytes:
    """The same from the lines that a run wrote of a completion, decoded.

    Args:
        line: its line of `outputs.jsonl`.
        records: its lines of `acceptance.jsonl`.

    Raises:
        ValueError, TypeError, KeyError: they are none.
    """
    logprobs = line.get("logprobs")
    return _bytes(
        line["text"],
        line["token_ids"],
        line["finish_reason"],
        line["prompt_tokens"],
        None if logprobs is None else [(each["logprob"], each["top"]) for each in logprobs],
        line.get("thoughts"),
        [[record[name] for name in TokenRecord._fields] for record in records],
    )


def _bytes(*parts: Any) -> bytes:
    *plain, records = parts
    columns = list(zip(*records, strict=True))  # they are alike, so that they take little room
    return zlib.compress(json.dumps([*plain, columns], separators=(",", ":")).encode(), _LEVEL)


def unpack(data: bytes, request: Request, sample: int) -> Completion:
    """The completion as one of a request's samples; its thoughts are without tokens, which no line has.

    Raises:
        ValueError, TypeError, zlib.error, RecursionError: the bytes are none of a completion.
    """
    text, token_ids, reason, prompt_tokens, logprobs, thoughts, columns = json.loads(zlib.decompress(data))
    records = tuple(map(TokenRecord._make, zip(*columns, strict=True)))
    return Completion(
        request=request,
        sample=sample,
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        logprobs=None
        if logprobs is None
        else tuple(TokenLogprobs(own, tuple(map(tuple, top))) for own, top in logprobs),
        records=records,
        drafts=counts_of(records),
        thoughts=None if thoughts is None else tuple(Thought(first, (), thought) for first, thought in thoughts),
    )


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
