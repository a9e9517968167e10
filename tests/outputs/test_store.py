"""The database of samples: what it keeps, and when it says that it cannot."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from detgen.cache.cache_folder import make_store, open_store
from detgen.engine.request import Request
from detgen.errors import StoreError
from detgen.machine import user_cache
from detgen.outputs.identity import Entry, asked_anywhere, asked_here, entry_key, profile_digest, sound
from detgen.outputs.store import STORE, Store, beside

A = "aa" * 16  # a profile


def key(number: int) -> bytes:
    return entry_key(A, "content", number)


def new(number: int) -> Entry:
    return Entry(key(number), 10, bytes([number % 251]) * 3000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(make_store(tmp_path / "c")) as store:
        store.add(A, "large", map(new, range(3)))
        yield store


def test_keys_differ_in_each_part() -> None:
    keys = [entry_key(a, b, n) for a in ("a", "aa") for b in ("a", "aa") for n in (0, 1)]
    assert len(set(keys)) == 8


def test_a_request_is_known_anywhere_or_in_its_place() -> None:
    chat = Request(3, "a", messages=[{"role": "user", "content": "x"}], line=4)
    assert asked_anywhere(chat) == asked_anywhere(replace(chat, index=5, id="b", line=9))
    assert asked_anywhere(chat, "2001-01-01") != asked_anywhere(chat) != asked_anywhere(chat, "2001-01-02")
    text = Request(0, 0, prompt="x")
    assert asked_anywhere(text, "2001-01-01") == asked_anywhere(text)
    unverified = text.with_params(deterministic=False)
    assert asked_anywhere(unverified) is None
    here = {asked_here(each, "p") for each in (text, replace(text, index=1), replace(text, line=2), unverified)}
    assert len({*here, asked_here(text, "q")}) == 5


def test_a_profile_counts_but_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {"target": {"name": "a", "digest": "d"}, "dtype": "float32"}
    digest = profile_digest(profile)
    assert profile_digest({"dtype": "float32", "target": {"name": "b", "digest": "d"}}) == digest
    assert profile_digest(profile | {"dtype": "float16"}) != digest
    monkeypatch.setattr("detgen.__version__", "99")
    assert profile_digest(profile) != digest


def test_bytes_count_with_their_key_only(store: Store) -> None:
    value = store.db.execute("SELECT value FROM packed WHERE id = 1").fetchone()[0]
    assert sound(key(0), value) == new(0).value
    assert sound(key(1), value) is None
    assert sound(key(0), value[:-1]) is None
    assert sound(key(0), value[:5]) is None
    assert sound(key(0), None) is None


def test_processes_that_make_it_at_once_make_one(tmp_path: Path) -> None:
    stop, failed = threading.Barrier(8), list[BaseException]()

    def work(number: int) -> None:
        stop.wait()
        try:
            with closing(make_store(tmp_path / "c")) as store:
                store.add(A, "large", [new(number)])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with open_store(tmp_path / "c") as store:
        assert store.count() == 8


def test_where_the_users_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert user_cache() == Path("/var/caches/detgen")
    for relative in ("", "caches"):  # the specification has it that relative paths do not count
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert user_cache() == Path("/home/someone/.cache/detgen")


def test_no_cache_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"there is no cache in .*/c; detgen run --cache .*/c makes one"),
        open_store(tmp_path / "c"),
    ):
        pass
    assert not (tmp_path / "c").exists()


def test_the_former_of_two_equal_entries_stays(store: Store) -> None:
    store.add(A, "large", [Entry(key(1), 10, b"other")])
    found = store.find(key(1))
    assert found is not None
    assert found[1] == new(1).value


def test_an_error_keeps_nothing_of_a_batch(store: Store) -> None:
    with closing(Store(store.path)) as other:
        with pytest.raises(StoreError, match=r"cannot use .*samples"):
            other.add(A, "large", [new(5000), Entry(key(5001), None, b"")])  # type: ignore[arg-type]
        assert other.find(key(5000)) is None


def test_the_database_is_as_it_should_be(store: Store) -> None:
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_lone_store_has_an_entry_for_each_of_requests_that_are_alike(tmp_path: Path) -> None:
    with closing(Store(tmp_path / STORE, lone=True)) as store:
        alike = [Entry(key(1), 10, bytes([place]), place) for place in (5, 9, 7)]
        entries = store.add(A, "large", alike)
        assert [store.find(key(1), place) for place in (9, 7, 5, 8)] == [
            (entries[1], b"\x09"), (entries[2], b"\x07"), (entries[0], b"\x05"), (entries[0], b"\x05")
        ]  # fmt: skip
        for store.until, found in (entries[1], (entries[0], b"\x05")), (0, None), (entries[2], (entries[2], b"\x07")):
            assert store.find(key(1), 7) == found
        store.db.execute("UPDATE packed SET value = x'00' WHERE id = ?", entries[1:2])
        assert store.find(key(1), 9) == (entries[0], b"\x05"), "a damaged one makes room for another"
        assert store.damaged == 1
        assert store.read(entries[1]) is None
        store.add(A, "large", [])
        assert store.count() == 2


def test_a_lone_store_is_alone_and_leaves_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.outputs.store._PATIENCE", 0.01)
    with closing(Store(tmp_path / STORE, lone=True)) as store:
        store.add(A, "large", [new(1)])
        assert store.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store.pragma("synchronous") == 2, "FULL"
        assert not (tmp_path / f"{STORE}-shm").exists()
        with pytest.raises(StoreError, match="another process keeps it locked; wait for that") as caught:
            Store(tmp_path / STORE)
        assert not caught.value.damaged
    assert [path.name for path in tmp_path.iterdir()] == [STORE]


@pytest.mark.parametrize("lone", [False, True])
def test_a_network_file_system_gets_a_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lone: bool
) -> None:
    """Also where a store was made in WAL mode."""
    with closing(Store(tmp_path / STORE, lone=lone)) as store:
        store.add(A, "large", [new(1)])
    monkeypatch.setattr("detgen.outputs.store.on_network", lambda path: True)
    with closing(Store(tmp_path / STORE, lone=lone)) as store:
        store.add(A, "large", [new(2)])
        assert store.db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert not any((tmp_path / name).exists() for name in beside(STORE)[1:])
        assert store.find(key(1)) is not None


@pytest.mark.parametrize("lone", [False, True])
def test_what_is_added_is_there_after_a_kill(tmp_path: Path, lone: bool) -> None:
    path = tmp_path / STORE
    if not (pid := os.fork()):
        store = Store(path, lone=lone)
        for number in range(300):
            store.add(A, "large", [new(number)])
        os._exit(0)
    os.waitpid(pid, 0)
    with closing(Store(path, lone=lone)) as store:
        store.check()
        assert [store.find(key(number)) is not None for number in range(300)] == [True] * 300


def test_one_of_another_version_or_program_is_named(tmp_path: Path) -> None:
    with closing(Store(tmp_path / STORE)) as store:
        store.db.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreError, match="was made by another version of detgen") as caught:
        Store(tmp_path / STORE)
    assert caught.value.damaged
