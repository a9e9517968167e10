"""The journal gives back what it was given, whatever a crash has made of its end."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.completions import completion, request
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import detgen.outputs.journal
import detgen.outputs.writer
from detgen.engine.request import Completion
from detgen.outputs.journal import Journal, make_entry


def journal_of(path: Path, completions: list[Completion]) -> list[int]:
    with closing(Journal(path)) as journal:
        offsets = [journal.append(make_entry(done)) for done in completions]
        journal.flush()
    return offsets


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    done = [completion(request(5)), completion(request(2, n=2), 1), completion(request(2, n=2), 0)]
    done[0] = replace(done[0], text='"quotes"\u2028 \ud800 \\ud800')
    journal_of(path, done[:1])
    journal_of(path, done[1:])
    with closing(Journal(path)) as journal:
        assert journal.kept == 3
        assert [journal.offsets(index, 1) for index in (0, 2, 4, 6)] == [None] * 4
        assert journal.offsets(2, 3) is None
        found = {**{(5, s): o for s, o in (journal.offsets(5, 1) or {}).items()}}
        found |= {(2, s): o for s, o in (journal.offsets(2, 2) or {}).items()}
        assert set(found) == {(5, 0), (2, 0), (2, 1)}
        for each in done:
            assert journal.read(found[each.request.index, each.sample]) == make_entry(each)


def test_a_prompt_without_its_first_sample_is_not_there(tmp_path: Path) -> None:
    journal_of(tmp_path / "j", [completion(request(0, n=2), 1), completion(request(1))])
    with closing(Journal(tmp_path / "j")) as journal:
        assert journal.offsets(0, 1) is None
        assert journal.offsets(0, 2) is None


def test_a_torn_end_is_cut_off_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    offsets = journal_of(path, [completion(request(index), length=0) for index in range(2)])
    whole = path.read_bytes()
    ends = [*offsets, len(whole)]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends) - 1
        with closing(Journal(path)) as journal:
            assert journal.kept == kept
            journal.append(make_entry(completion(request(7))))
            journal.flush()
        assert path.read_bytes()[: ends[kept]] == whole[: ends[kept]]
        with closing(Journal(path)) as journal:
            assert journal.kept == kept + 1


@given(st.data())
@examples(25)
def test_damage_behind_the_last_fsync_is_cut_off(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    offsets = journal_of(path, [completion(request(index), length=1) for index in range(3)])
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with closing(Journal(path)) as journal:
        assert journal.kept == sum(offset <= at for offset in offsets) - 1


def test_commits_are_fsynced_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for seconds, expected in ((0.0, 3), (60.0, 0)):
        monkeypatch.setattr(detgen.outputs.journal, "SYNC_SECONDS", seconds)
        synced.clear()
        with closing(Journal(tmp_path / "j")) as journal:
            for index in range(3):
                journal.append(make_entry(completion(request(index))))
                journal.flush()
            assert len(synced) == expected
            journal.flush(sync=True)
            assert len(synced) == expected + 1
