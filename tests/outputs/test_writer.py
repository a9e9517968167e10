"""The writer: any order in, input order out, nothing lost where it is stopped."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.completions import NUMBERED, completion, lines_of, request
from helpers.examples import examples
from helpers.records import log_entries
from hypothesis import given
from hypothesis import strategies as st

import detgen.outputs.writer
from detgen.engine.request import Completion, Request
from detgen.errors import OutputError
from detgen.outputs import FolderStore, OutputFolder, Samples, SharedStore, Writer
from detgen.prompts import BadLine

PROFILE = {"target": {"name": "m", "digest": "d"}, "dtype": "float32"}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit at each flush."""
    monkeypatch.setattr(detgen.outputs.writer, "SPARING", 0)


@contextmanager
def opened(folder: OutputFolder, shared: SharedStore | None = None) -> Iterator[Writer]:
    """A writer with the folder's store."""
    with (
        closing(FolderStore(folder)) as own,
        closing(
            Writer(folder, Samples(own, shared, {"profile": PROFILE}, "p", dated=False), pieces=NUMBERED)
        ) as writer,
    ):
        yield writer


@given(
    samples=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    seed=st.randoms(use_true_random=False),
    cut=st.floats(0, 1),
)
@examples(25)
def test_any_order_in_input_order_out(
    tmp_path_factory: pytest.TempPathFactory, samples: list[int], seed: Any, cut: float
) -> None:
    """Prompts of 0 (a bad line) to 3 samples, finished in any order, stopped anywhere and resumed."""
    path = tmp_path_factory.mktemp("out")
    items: list[Request | BadLine] = [
        request(index, n=n) if n else BadLine(index, index + 1, index + 1, "bad") for index, n in enumerate(samples)
    ]
    expected = [(index, sample) for index, n in enumerate(samples) for sample in range(max(n, 1))]
    with OutputFolder(path) as folder:
        for last in (False, True):
            with opened(folder) as writer:
                left = []
                for item in items:
                    if isinstance(item, BadLine):
                        writer.refuse(item)
                    else:
                        missing = writer.recall(item)
                        left += [completion(item, sample, length=item.index % 5) for sample in missing]
                seed.shuffle(left)
                for done in left if last else left[: int(cut * len(left))]:
                    writer.finish(done)
                    writer.flush()
                    written = [(line["index"], line["sample"]) for line in lines_of(folder.outputs)]
                    assert written == expected[: len(written)]
                files = writer.finish_all()
                totals = writer.totals
        assert writer.waiting == 0
        assert writer.done == totals.prompts == len(samples)
        assert writer.errors == totals.errors == samples.count(0)
        assert writer.resumed + writer.fresh.samples == totals.samples == sum(samples)
        assert [(line["index"], line["sample"]) for line in lines_of(folder.outputs)] == expected
        for path in (folder.outputs, folder.acceptance):
            data = path.read_bytes()
            assert files[path.name] == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        log = log_entries(folder.acceptance)
        counts = Counter(line["status"] for line in log)
        total = totals.drafters.total()
        assert all(getattr(total, status) == counts[status] for status in ("accepted", "corrected", "bonus", "plain"))
        assert total.rolled_back == counts["rolled_back"]
        assert total.drafted == sum(line["drafted"] is not None for line in log)
        tokens = {(line["index"], line["sample"]): line.get("token_ids", []) for line in lines_of(folder.outputs)}
        for key, ids in tokens.items():
            own = [line for line in log if (line["index"], line["sample"]) == key]
            assert [line["token"] for line in own if line["token"] is not None] == ids
        assert [(line["index"], line["sample"]) for line in log] == sorted(
            (line["index"], line["sample"]) for line in log
        )


def test_an_error_ends_all_samples_of_a_prompt(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out") as folder, opened(folder) as writer:
        writer.recall(request(0, n=3))
        writer.finish(Completion(request(0, n=3), error="too long"))
        writer.finish(completion(request(0, n=3), 1))
        writer.finish_all()
        assert [line.get("error") for line in lines_of(folder.outputs)] == ["too long"]
        assert (writer.done, writer.errors, writer.totals.samples) == (1, 1, 0)


def test_the_errors_of_an_engine_are_tried_again(tmp_path: Path) -> None:
    """They cost nothing, and whoever gives more memory on resuming expects them to run."""
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            writer.recall(request(0))
            writer.finish(Completion(request(0), error="needs more KV memory"))
            writer.flush()
        with opened(folder) as writer:
            assert list(writer.recall(request(0))) == [0]


def test_of_other_requests_nothing_is_taken(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            writer.recall(request(0))
            writer.finish(completion(request(0)))
            writer.flush()
        with opened(folder) as writer:
            assert writer.recall(replace(request(0), prompt="other")) == [0]
            assert writer.resumed == 0


def test_a_writer_is_full_when_too_much_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen.outputs.writer, "AHEAD_PROMPTS", 3)
    monkeypatch.setattr(detgen.outputs.writer, "AHEAD_BYTES", 1000)
    with OutputFolder(tmp_path / "out") as folder, opened(folder) as writer:
        for index in range(3):
            assert not writer.full
            writer.recall(request(index))
        assert writer.full
        for index in (2, 0, 1):
            writer.finish(completion(request(index)))
            writer.flush()
            assert writer.full == (index == 2)
        writer.recall(request(3))
        writer.refuse(BadLine(4, 5, 5, "e" * 2000))
        assert writer.full
        writer.finish(completion(request(3)))
        writer.flush()
        assert not writer.full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("victim", ["outputs.jsonl", "acceptance.jsonl"])
def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, number: int
) -> None:
    write = os.write

    def half(file: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(victim) and len(data) > 1:
            return write(file, data[: len(data) // 2])
        if os.readlink(f"/proc/self/fd/{file}").endswith(victim):
            raise OSError(number, os.strerror(number))
        return write(file, data)

    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            for index in (0, 1):
                writer.recall(request(index))
            writer.finish(completion(request(0)))
            writer.flush()
            writer.finish(completion(request(1)))
            monkeypatch.setattr(os, "write", half)
            with pytest.raises(OutputError, match=rf"cannot write .*{victim}: .*; free some space, then run the same"):
                writer.flush()
            monkeypatch.undo()
        with opened(folder) as writer:
            for index in (0, 1):
                assert not writer.recall(request(index))
            writer.finish_all()
            assert writer.resumed == 2
        assert [line["index"] for line in lines_of(folder.outputs)] == [0, 1]


def test_a_store_that_has_no_room_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            for index in (0, 1):
                writer.recall(request(index))
            writer.finish(completion(request(0)))
            writer.flush()
            writer._store.db.execute("PRAGMA max_page_count = 1").fetchall()
            writer.finish(completion(request(1), length=9000))
            with pytest.raises(OutputError, match=r"cannot use .*: .* is full; free some space, then run"):
                writer.flush()
        assert [line["index"] for line in lines_of(folder.outputs)] == [0], "no line without its entry"
        with opened(folder) as writer:
            assert [list(writer.recall(request(index))) for index in (0, 1)] == [[], [0]]


def test_a_line_waits_for_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And commits wait for so many times as long as one takes; whoever ends in between commits what there is."""
    monkeypatch.setattr(detgen.outputs.writer, "SPARING", 50)
    now = [0.0]
    monkeypatch.setattr(detgen.outputs.writer.time, "monotonic", lambda: now[0])
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            add, durations = writer._store.add, iter([0.02, 0.01, 0.01])

            def slow(*given: Any) -> list[int]:
                now[0] += next(durations)
                return add(*given)

            monkeypatch.setattr(writer._store, "add", slow)
            for index in range(4):
                writer.recall(request(index))
            steps = [0, 0.9, 0.2, 0.4]  # seconds
            for index, seconds in enumerate(steps):
                now[0] += seconds
                writer.finish(completion(request(index)))
                writer.flush()
            assert [line["index"] for line in lines_of(folder.outputs)] == [0, 1, 2], "0.5 s have not gone by"
            now[0] += 0.1
        with opened(folder) as writer:
            assert not any(writer.recall(request(index)) for index in range(4))
            writer.finish_all()
        assert [line["index"] for line in lines_of(folder.outputs)] == [0, 1, 2, 3]


def test_memory_holds_no_text_of_a_prompt_that_waits(tmp_path: Path) -> None:
    """Only what its lines repeat of it."""
    with OutputFolder(tmp_path / "out") as folder, opened(folder) as writer:
        long = "a long prompt " * 1000
        for index in range(100):
            writer.recall(Request(index, index, prompt=long + str(index), metadata={"k": index}))
            if index:
                made = completion(request(index), length=50)
                writer.finish(replace(made, request=Request(index, index, prompt=long, metadata={"k": index})))
        writer.flush()
        assert writer.waiting == 100
        assert len(pickle.dumps(writer._slots)) < 100 * 1000
        assert not writer.full
        writer.finish(completion(Request(0, 0, prompt=long + "0", metadata={"k": 0})))
        writer.finish_all()
        assert [line["metadata"]["k"] for line in lines_of(folder.outputs)] == list(range(100))


def test_only_the_samples_that_are_missing_run_again(tmp_path: Path) -> None:
    asked = request(0, n=4)
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            assert list(writer.recall(asked)) == [0, 1, 2, 3]
            for sample in (3, 1):
                writer.finish(completion(asked, sample))
            writer.flush()
        with opened(folder) as writer:
            assert list(writer.recall(asked)) == [0, 2]
            assert (writer.resumed, writer.done) == (2, 0)
            for sample in (2, 0):
                writer.finish(completion(asked, sample))
            writer.finish_all()
            assert (writer.done, writer.fresh.samples, writer.totals.samples) == (1, 2, 4)
        assert [line["sample"] for line in lines_of(folder.outputs)] == [0, 1, 2, 3]


def test_what_is_reused_counts_apart_and_waits_for_its_commit(tmp_path: Path) -> None:
    shared = SharedStore(tmp_path / "shared.sqlite3", print)
    with OutputFolder(tmp_path / "other") as folder, opened(folder, shared) as writer:
        writer.recall(request(0))
        writer.finish(completion(request(0)))
        writer.finish_all()
    with OutputFolder(tmp_path / "out") as folder:
        with opened(folder) as writer:
            for index in range(3):
                writer.recall(request(index))
            writer.finish(completion(request(1)))
            writer.flush()
        with opened(folder, shared) as writer:
            assert not writer.recall(request(0))
            assert not writer.recall(request(1)), "comes next in order, behind one that the store does not have yet"
            assert lines_of(folder.outputs) == []
            writer.refuse(BadLine(2, 3, 3, "bad"))
            writer.finish_all()
            assert (writer.reused, writer.resumed, writer.fresh.samples, writer.totals.samples) == (1, 1, 0, 2)
        assert [line["index"] for line in lines_of(folder.outputs)] == [0, 1, 2]
        with opened(folder) as writer:
            assert not writer.recall(request(0)), "it needs the shared store no more"
