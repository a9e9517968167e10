"""Where a run looks for finished samples and stores them: its folder's store and, if asked for, a shared one.

A sample is stored as bytes: all that its lines need, except what they repeat of the request.

To inspect a stopped run without changing its folder, `KeptSamples` reads its samples from a copy of its store.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from datetime import date, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from detgen.engine.answer import Answer, ToolCall
from detgen.engine.request import Completion, Request, Thought, TokenLogprobs, TokenRecord
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import DraftCounts
from detgen.errors import StoreError
from detgen.outputs.directory import open_plain
from detgen.outputs.identity import Entry, asked_anywhere, asked_here, entry_key, profile_digest
from detgen.outputs.shared_store import SharedStore
from detgen.outputs.store import STORE, Store, beside

_LEVEL = 1  # of compression: a third of the size, in less time than writing the rest would take
_GIVEN = ("request", "sample", "drafts")  # known when unpacking, or a function of the records
_WHOLE = TokenRecord._fields[:-2]  # columns of a record except the last two, which are floats
_NONE = math.nan  # no line has another NaN, since it would be null, too

_MALFORMED = (ValueError, TypeError, AttributeError, struct.error, zlib.error, RecursionError)
Sample = Completion | Score
_BATCH = 256  # samples that may wait for the shared store
_MANY, _MOST_BYTES = 1000, 1 << 20  # samples, or bytes, that may wait for the folder's store


def pack(sample: Completion | Score) -> bytes:
    """Pack a sample, which may have ended with an error of its own."""
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
            values["records"] = whole  # by columns, whose values are similar
            floats = [_NONE if value is None else value for value in (*logprobs, *margins)]
    elif sample.logprobs:
        floats = [*values.pop("logprobs")]
    head = zlib.compress(json.dumps(values, separators=(",", ":")).encode(), _LEVEL)
    return head + zlib.compress(_planes(struct.pack(f"<{len(floats)}d", *floats)), _LEVEL) if floats else head


def unpacked(data: bytes, request: Request, sample: int) -> Completion | Score | None:
    """Unpack a sample of a request; its thoughts have no tokens, since no line has them.

    None if the bytes are not such a sample: their digest may be right even in a stranger's store.
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
    """Return draft counts from a sample's records, as the engine counts, with drafters in order of appearance."""
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
    """Reorder bytes of numbers: first bytes first. With the number of numbers as `step`, restore the order.

    Most of the numbers are float32 values stored as float64, whose last bytes are zero, so they compress well.
    """
    return b"".join(data[start::step] for start in range(step)) if data else data


class Samples:
    """The samples of one profile in the stores of a run.

    Args:
        own: the folder's store; None if it has none yet.
        shared: the store of `--cache`; None for none.
        manifest: the run's manifest, with its profile; a resumed run keeps the day on which it began.
        source: name of the input in errors.
        dated: whether chats are rendered with the date; a shared store is then searched for today's samples.

    Raises:
        OutputError: by every method, if the folder's store cannot be used.
    """

    def __init__(
        self, own: Store | None, shared: SharedStore | None, manifest: dict[str, Any], source: str, *, dated: bool
    ) -> None:
        self.own, self._shared, self._source = own, shared, source
        self._begun = datetime.fromisoformat(manifest["created"]).astimezone().date().isoformat() if dated else ""
        self._today = date.today().isoformat() if dated else ""
        profile = manifest["profile"]
        self._profile, self._model = profile_digest(profile), profile["target"]["name"]
        self._new: list[Entry] = []
        self._size = 0  # bytes of `_new`
        self._new_shared: list[Entry] = []

    def has(self, request: Request) -> bool:
        """Return whether all of a request's samples are stored, damaged or not."""
        own, shared = self._own_keys(request), self._shared_keys(request)
        return all(
            any(self.own is not None and self.own.has(self._key(asked, sample)) for asked in own)
            or any(self._shared is not None and self._shared.has(self._key(asked, sample)) for asked in shared)
            for sample in request.wanted
        )

    def take_own(self, request: Request, samples: Sequence[int]) -> dict[int, tuple[int, Sample]]:
        """Return the samples of a request that the folder had when the run began: entry and sample, by number."""
        if self.own is None or not self.own.until:
            return {}
        found = self._take(self.own, self._own_keys(request), request, samples)
        if self._begun == self._today:
            for _, made, value in found.values():
                self._share(made, value)
        return {sample: (entry, made) for sample, (entry, made, _) in found.items()}

    def take_shared(self, request: Request, samples: Sequence[int]) -> dict[int, Sample]:
        """Return the samples of a request that the shared store has, by number."""
        if self._shared is None or not samples:
            return {}
        found = self._take(self._shared, self._shared_keys(request), request, samples)
        return {sample: made for sample, (_, made, _) in found.items()}

    def _take(
        self, store: Store, keys: list[str], request: Request, samples: Sequence[int]
    ) -> dict[int, tuple[int, Sample, bytes]]:
        """Return entry, sample and bytes, by number, of the samples that a store has under one of the keys."""
        found: dict[int, tuple[int, Sample, bytes]] = {}
        for sample in samples:
            for asked in keys:
                entry = store.find(self._key(asked, sample), request.index)
                if entry is not None and (made := unpacked(entry[1], request, sample)) is not None:
                    found[sample] = entry[0], made, entry[1]
                    break
        return found

    @property
    def many(self) -> bool:
        """Whether so many samples wait in memory that they should be committed."""
        return len(self._new) >= _MANY or self._size >= _MOST_BYTES

    def add(self, sample: Sample, *, shared: bool = False) -> None:
        """Add a sample, to be stored by the next `commit`; `shared`: it came from the shared store."""
        value = pack(sample)
        request = sample.request
        asked = None if sample.error is not None else asked_anywhere(request, self._begun)
        key = self._key(asked or asked_here(request, self._source), sample.sample)
        self._new.append(Entry(key, len(sample.token_ids), value, request.index))
        self._size += len(value)
        if not shared:
            self._share(sample, value)

    def commit(self) -> list[int]:
        """Write what was added to the shared store and then, durably, to the folder's; return its entries there."""
        assert self.own is not None
        self._commit_shared()
        entries = self.own.add(self._profile, self._model, self._new) if self._new else []
        self._new.clear()
        self._size = 0
        return entries

    def read(self, entry: int, request: Request, sample: int) -> Sample:
        """Return the content of an entry of the folder's store, as a sample of a request."""
        assert self.own is not None
        found = unpacked(self.own.read(entry) or b"", request, sample)
        if found is None:  # this process has read or written the entry before
            raise self.own.failed(StoreError(f"a sample in {self.own.path} is gone", True))
        return found

    def _share(self, sample: Sample, value: bytes) -> None:
        """Add a sample for the shared store, if others may use it: errors are to be tried again."""
        if self._shared is not None and sample.error is None:
            for asked in self._shared_keys(sample.request):
                self._new_shared.append(Entry(self._key(asked, sample.sample), len(sample.token_ids), value))
            if len(self._new_shared) >= _BATCH:
                self._commit_shared()

    def _commit_shared(self) -> None:
        if self._shared is not None and self._new_shared:
            self._shared.add(self._profile, self._model, self._new_shared)
            self._new_shared.clear()

    def _key(self, asked: str, sample: int) -> bytes:
        return entry_key(self._profile, asked, sample)

    def _own_keys(self, request: Request) -> list[str]:
        """Return what the folder's store may have a sample under."""
        anywhere = asked_anywhere(request, self._begun)
        return [*([] if anywhere is None else [anywhere]), asked_here(request, self._source)]

    def _shared_keys(self, request: Request) -> list[str]:
        asked = asked_anywhere(request, self._today)
        return [] if asked is None else [asked]


class KeptSamples:
    """A copy of a folder's store, including what a killed run left in SQLite's log; `with` makes and deletes it.

    Args:
        folder: the output folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: Store | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        place = Path(self._opened.enter_context(TemporaryDirectory(prefix="detgen-"))) / STORE
        with suppress(OSError, StoreError):
            for name in (STORE, *beside(STORE)):
                with (
                    suppress(FileNotFoundError),
                    open(open_plain(self._folder / name), "rb") as source,
                    place.with_name(name).open("wb") as target,
                ):
                    shutil.copyfileobj(source, target)
            if place.exists():
                self._store = Store(place, lone=True)
                self._opened.callback(self._store.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def count(self) -> int:
        """Return the number of samples, as far as the store can be read."""
        with suppress(StoreError):
            return 0 if self._store is None else self._store.count()
        return 0

    def find(
        self, request: Request, sample: int, manifest: dict[str, Any], source: str, *, dated: bool
    ) -> Sample | None:
        """Return a sample of the run; None if it is not there.

        Args:
            request: the request.
            sample: number of the sample.
            manifest: the run's manifest.
            source: name of the input in errors.
            dated: whether chats are rendered with the date.
        """
        with suppress(StoreError):
            samples = Samples(self._store, None, manifest, source, dated=dated)
            if sample in (found := samples.take_own(request, [sample])):
                return found[sample][1]
        return None
