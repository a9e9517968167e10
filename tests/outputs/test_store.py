"""The database of a cache: what it keeps, and when it says that it cannot."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from detgen.cache.cache_folder import default_folder, make_store, open_store
from detgen.cache.store import New, Store, entry_key, profile_digest, sound
from detgen.errors import CacheError

A = "aa" * 16  # a profile


def key(number: int) -> bytes:
    return entry_key(A, "content", number)


def new(number: int) -> New:
    return New(key(number), 10, bytes([number % 251]) * 3000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(make_store(tmp_path / "c")) as store:
        store.add(A, "large", map(new, range(3)))
        yield store


def test_keys_differ_in_each_part() -> None:
    keys = [entry_key(a, b, n) for a in ("a", "aa") for b in ("a", "aa") for n in (0, 1)]
    assert len(set(keys)) == 8


def test_a_profile_counts_but_for_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {"target": {"name": "a", "digest": "d"}, "dtype": "float32"}
    digest = profile_digest(profile)
    assert profile_digest({"dtype": "float32", "target": {"name": "b", "digest": "d"}}) == digest
    assert profile_digest(profile | {"dtype": "float16"}) != digest
    monkeypatch.setattr("detgen.__version__", "99")
    assert profile_digest(profile) != digest


def test_bytes_count_with_their_key_only(store: Store) -> None:
    value = store.db.execute("SELECT value FROM completions WHERE id = 1").fetchone()[0]
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
    assert default_folder() == Path("/var/caches/detgen")
    for relative in ("", "caches"):  # the specification has it that relative paths do not count
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert default_folder() == Path("/home/someone/.cache/detgen")


def test_no_cache_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CacheError, match=r"there is no cache in .*/c; detgen run --cache .*/c makes one"),
        open_store(tmp_path / "c"),
    ):
        pass
    assert not (tmp_path / "c").exists()


def test_the_former_of_two_equal_entries_stays(store: Store) -> None:
    store.add(A, "large", [New(key(1), 10, b"other")])
    assert store.find(key(1)) == new(1).value


def test_an_error_keeps_nothing_of_a_batch(store: Store) -> None:
    with pytest.raises(CacheError, match="cannot use the cache"):
        store.add(A, "large", [new(5000), New(key(5001), None, b"")])  # type: ignore[arg-type]
    assert store.find(key(5000)) is None


def test_the_database_is_as_it_should_be(store: Store) -> None:
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
