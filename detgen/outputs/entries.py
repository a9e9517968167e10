"""Entries of the journal: a finished sample as bytes with a checksum, and finding all that are whole in a file."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from detgen.engine.request import Completion
from detgen.engine.score_requests import Score
from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.outputs.directory import open_plain
from detgen.outputs.lines import acceptance_lines, content_digest, dump, output_line, request_digest, shallow

_HEAD = re.compile(
    rb'\{"crc32":"([0-9a-f]{8})",("index":(\d{1,12}),"sample":(\d{1,12}),"bytes":\[(\d{1,12}),(\d{1,12})\],.*\}\n)'
)
_BEGIN = b'{"crc32":"'  # no other line of a journal begins so
_OUTPUT = re.compile(rb'\{"id":.*?,"index":\d+,"sample":\d+,"(?:text|logprob|error)":')
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished sample.

    Attributes:
        index: place of the prompt in the input, from 0.
        sample: which of the prompt's samples, from 0.
        request: digest of the request.
        tokens: tokens of the completion.
        prompt_tokens: tokens of the prompt.
        drafts: the counts of its records, by drafter.
        output: its line of `outputs.jsonl`.
        acceptance: its lines of `acceptance.jsonl`.
        content: the `content_digest` of the request.
        error: whether the sample ended with an error; then it has neither tokens nor lines of the acceptance log.
    """

    index: int
    sample: int
    request: str
    tokens: int
    prompt_tokens: int
    drafts: DraftCounts
    output: bytes
    acceptance: bytes
    content: str | None = None
    error: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a journal that belong to no whole entry.

    Attributes:
        start: its first byte.
        end: the byte behind it.
        lost: samples that it held, as far as can be seen.
        torn: it is the beginning of an entry and the journal's end, as a crash leaves it.
    """

    start: int
    end: int
    lost: int
    torn: bool


def make_entry(completion: Completion | Score) -> Entry:
    """The entry of a sample that ran."""
    error = completion.error is not None
    logged = completion if isinstance(completion, Completion) and not error else None
    return Entry(
        index=completion.request.index,
        sample=completion.sample,
        request=request_digest(completion.request),
        tokens=0 if error else len(completion.token_ids),
        prompt_tokens=0 if error else completion.prompt_tokens,
        drafts=logged.drafts if logged else DraftCounts(),
        output=output_line(completion).encode(),
        acceptance=acceptance_lines(logged).encode() if logged else b"",
        content=content_digest(completion.request),
        error=error,
    )


def pack(entry: Entry) -> bytes:
    """An entry as the journal has it."""
    figures = {
        "index": entry.index,
        "sample": entry.sample,
        "bytes": (len(entry.output), len(entry.acceptance)),
        "request": entry.request,
        "tokens": entry.tokens,
        "prompt_tokens": entry.prompt_tokens,
        "drafts": {name: shallow(stats) for name, stats in entry.drafts.items()},
        "content": entry.content,
    }
    if entry.error:
        figures["error"] = True
    body = b"".join((dump(figures)[1:].encode(), b"\n", entry.output, entry.acceptance))
    return _BEGIN + b'%08x",' % zlib.crc32(body) + body


Packed = tuple[re.Match[bytes], bytes, bytes]  # line of figures, lines of the two files


def unpack(packed: Packed) -> Entry | None:
    """The entry; None if its figures are not detgen's."""
    head, output, acceptance = packed
    try:
        fields = json.loads(b"{" + head[2])
        drafts = DraftCounts({name: DrafterStats(**counts) for name, counts in fields["drafts"].items()})
        known = {name: fields[name] for name in ("index", "sample", "request", "tokens", "prompt_tokens")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    counts = [
        known["tokens"],
        known["prompt_tokens"],
        *(count for each in drafts.values() for count in shallow(each).values()),
    ]
    if not all(type(count) is int for count in counts) or not isinstance(fields.get("content"), str | None):
        return None
    return Entry(
        **known,
        drafts=drafts,
        output=output,
        acceptance=acceptance,
        content=fields.get("content"),
        error="error" in fields,
    )


def place(packed: Packed) -> tuple[int, int]:
    """Index and sample of an entry, without looking at the rest."""
    return int(packed[0][3]), int(packed[0][4])


def read_packed(file: BinaryIO) -> Packed | None:
    """Read the entry at the file's position; None if it is incomplete or damaged."""
    head = _HEAD.fullmatch(file.readline())
    if head is None:
        return None
    output, acceptance = int(head[5]), int(head[6])
    if output + acceptance > os.fstat(file.fileno()).st_size - file.tell():
        return None
    lines = file.read(output + acceptance)
    if int(head[1], 16) != zlib.crc32(lines, zlib.crc32(head[2])):
        return None
    return head, lines[:output], lines[output:]


def scan(file: BinaryIO) -> Iterator[tuple[int, Packed] | Gap]:
    """All whole entries of a file with their offsets, and the gaps between them, in order."""
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        file.seek(at)
        found = read_packed(file)
        if found is not None:
            start, at = at, file.tell()
            yield start, found
        else:
            after = _next_whole(file, at)
            yield _gap(file, at, size if after is None else after, last=after is None)
            at = size if after is None else after


def read_entries(path: Path) -> Iterator[Entry]:
    """The whole entries of a journal, in the order of finishing; it need not be open.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    with open(open_plain(path), "rb") as file:
        for found in scan(file):
            if isinstance(found, tuple) and (entry := unpack(found[1])) is not None:
                yield entry


def _next_whole(file: BinaryIO, after: int) -> int | None:
    """Where the next whole entry behind a byte begins; None if there is none."""
    mark = b"\n" + _BEGIN
    at = after
    while True:
        file.seek(at)
        block = file.read(_BLOCK)
        found = block.find(mark)
        if found < 0:
            if len(block) < _BLOCK:
                return None
            at += _BLOCK - len(mark) + 1
            continue
        at += found + 1
        file.seek(at)
        if read_packed(file) is not None:
            return at


def _gap(file: BinaryIO, start: int, end: int, *, last: bool) -> Gap:
    """Look at a gap: each sample that was in it has left a line of figures, an output line, or neither."""
    file.seek(start)
    first = file.readline()
    head = _HEAD.fullmatch(first)
    cut = head is not None and start + len(first) + int(head[5]) + int(head[6]) > end
    torn = last and (cut or (first.startswith(_BEGIN[: len(first)]) and not first.endswith(b"\n")))
    file.seek(start)
    heads = outputs = 0
    while file.tell() < end and (line := file.readline()):
        heads += line.startswith(_BEGIN)
        outputs += _OUTPUT.match(line) is not None
    return Gap(start, end, max(heads, outputs, 1), torn)
