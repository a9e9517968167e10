"""The journal gives back what it was given, whatever a crash has made of its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import detgen.outputs.journal
import pytest
from detgen.outputs.entries import make_entry, read_entries
from detgen.outputs.journal import Journal
from helpers.completions import completion, request
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import detgen.outputs.writer
from detgen.engine.request import Completion
from detgen.outputs import OutputFolder

MANIFEST = {
    "detgen": "1",
    "status": "running",
    "input": {"path": "p", "format": "jsonl", "sha256": "00"},
    "parameters": {},
}


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """The journal at a path, in a folder of its own."""
    (path.parent / "manifest.json").write_text(json.dumps(MANIFEST))
    with OutputFolder(path.parent) as folder, closing(Journal(folder)) as journal:
        yield journal


def journal_of(path: Path, completions: list[Completion]) -> list[int]:
    with opened(path) as journal:
        offsets = [journal.append(make_entry(done)) for done in completions]
        journal.flush()
    return offsets


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    done = [completion(request(5)), completion(request(2, n=2), 1), completion(request(2, n=2), 0)]
    done[0] = replace(done[0], text='"quotes"\u2028 \ud800 \\ud800')
    journal_of(path, done[:1])
    journal_of(path, done[1:])
    with opened(path) as journal:
        assert journal.kept == 3
        assert [journal.offsets(index) for index in (0, 4, 6)] == [{}] * 3
        found = {(index, s): o for index in (5, 2) for s, o in journal.offsets(index).items()}
        assert set(found) == {(5, 0), (2, 0), (2, 1)}
        for each in done:
            assert journal.read(found[each.request.index, each.sample]) == make_entry(each)


def test_a_prompt_may_be_there_without_its_first_sample(tmp_path: Path) -> None:
    journal_of(tmp_path / "journal.jsonl", [completion(request(0, n=2), 1), completion(request(1))])
    with opened(tmp_path / "journal.jsonl") as journal:
        assert set(journal.offsets(0)) == {1}


def test_a_torn_end_is_cut_off_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    offsets = journal_of(path, [completion(request(index), length=0) for index in range(2)])
    whole = path.read_bytes()
    ends = [*offsets, len(whole)]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends) - 1
        with opened(path) as journal:
            assert journal.kept == kept
            journal.append(make_entry(completion(request(7))))
            journal.flush()
        assert path.read_bytes()[: ends[kept]] == whole[: ends[kept]]
        with opened(path) as journal:
            assert journal.kept == kept + 1


@given(st.data())
@examples(25)
def test_damage_costs_the_samples_that_it_hits_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    offsets = journal_of(path, [completion(request(index), length=1) for index in range(3)])
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with opened(path) as journal:
        assert journal.kept == 2
        [gap] = journal.gaps
        hit = sum(offset <= at for offset in offsets) - 1
        assert (gap.start, gap.lost) == (offsets[hit], 1)
        for index in {0, 1, 2} - {hit}:
            found = journal.offsets(index)
            assert journal.read(found[0]) == make_entry(completion(request(index), length=1))
        assert journal.offsets(hit) == {}
        journal.append(make_entry(completion(request(hit), length=1)))
        journal.flush()
    with opened(path) as journal:
        assert (journal.kept, journal.gaps) == (3, [])  # said once
    assert len(list(read_entries(path))) == 3


def test_commits_are_fsynced_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for seconds, expected in ((0.0, 3), (60.0, 0)):
        monkeypatch.setattr(detgen.outputs.journal, "SYNC_SECONDS", seconds)
        with opened(tmp_path / "journal.jsonl") as journal:
            synced.clear()  # of the folder
            for index in range(3):
                journal.append(make_entry(completion(request(index))))
                journal.flush()
            assert len(synced) == expected
            journal.flush(sync=True)
            assert len(synced) == expected + 1
