"""What a cache holds, and what goes when it is pruned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import detgen
from detgen.cache.cache_folder import contents, make_store, prune
from detgen.outputs.identity import Entry, entry_key
from detgen.outputs.store import Store

A, B = "aa" * 16, "bb" * 16  # profiles


def key(number: int) -> bytes:
    return entry_key(A, "content", number)


def new(number: int, size: int = 3000) -> Entry:
    return Entry(key(number), 10, bytes([number % 251]) * size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(make_store(tmp_path / "c")) as store:
        store.add(A, "large", map(new, range(300)))
        store.add(B, "small", [new(1000)])
        store.db.execute("UPDATE entries SET used = ? - 100 + id", [int(time.time())])
        yield store


def there(store: Store) -> set[int]:
    return {number for number in (*range(300), 1000) if store.find(key(number)) is not None}


def file_size(store: Store) -> int:
    return store.path.stat().st_size


def test_contents(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = contents(store)
    assert [(m.name, m.digest, m.completions, m.tokens, m.usable) for m in found.models] == [
        ("large", "aa" * 6, 300, 3000, True),
        ("small", "bb" * 6, 1, 10, True),
    ]
    assert (found.completions, found.tokens, found.damaged) == (301, 3010, None)
    assert found.latest is not None
    assert found.oldest == found.latest - 300
    assert found.size > 300 * 3000
    assert contents(store, check=True).damaged == 0
    monkeypatch.setattr(detgen, "__version__", "99")
    assert not any(model.usable for model in contents(store).models)


def test_what_is_damaged_goes_and_the_rest_stays(store: Store) -> None:
    store.db.execute("UPDATE packed SET value = zeroblob(3016) WHERE id = 5")
    store.db.execute("DELETE FROM packed WHERE id = 8")
    store.db.execute("UPDATE entries SET key = zeroblob(32) WHERE id = 9")
    assert contents(store, check=True).damaged == 3
    assert prune(store).removed == 3
    assert there(store) == {*range(300), 1000} - {4, 7, 8}
    assert contents(store, check=True).damaged == 0


def test_what_this_version_cannot_use_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen, "__version__", "99")
    store.add("cc" * 16, "new", [new(2000)])
    assert prune(store).removed == 301
    assert store.find(key(2000)) is not None


def test_what_was_not_used_for_long_goes(store: Store) -> None:
    store.db.execute("UPDATE entries SET used = used - 3600 * 24 WHERE id <= 100")
    assert prune(store, older_than=3600 * 12).removed == 100
    assert there(store) == {*range(100, 300), 1000}
    assert prune(store, older_than=3600 * 12).removed == 0


@pytest.mark.parametrize("most", [0, 100_000, 500_000, 10**9])
def test_what_was_used_least_recently_goes_until_the_rest_fits(store: Store, most: int) -> None:
    before = there(store)
    pruned = prune(store, max_size=most)
    left = sorted(there(store))
    assert len(left) == 301 - pruned.removed
    assert left == sorted(before)[pruned.removed :], "the first ones were used first"
    assert pruned.after == contents(store).size
    if most == 0:
        assert left == []
    elif most < 10**9:
        assert most * 0.7 < pruned.after <= most
    else:
        assert pruned.removed == 0
    assert file_size(store) <= max(most, 40_000) + 100_000 or most == 10**9
    if most < 10**9:
        assert file_size(store) == pruned.after, "space is given back"


def test_a_use_keeps_a_completion(store: Store) -> None:
    store.db.execute("UPDATE entries SET used = used - 3600 * 24")
    assert store.find(key(3)) is not None
    store.add(A, "large", [])
    with closing(Store(store.path)) as other:
        assert other.find(key(5)) is not None
    assert prune(store, older_than=3600 * 12).removed == 300
    assert there(store) == {5}, "uses are noted when a cache is closed"


def test_a_run_may_use_it_meanwhile(store: Store) -> None:
    with closing(Store(store.path)) as other:
        assert other.find(key(1)) is not None
        prune(store, max_size=0)
        assert other.find(key(1)) is None
        other.add(A, "large", [new(1)])
        assert there(store) == {1}
