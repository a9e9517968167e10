"""A run whose folder's store is damaged: what is whole is taken, the rest runs again, and every byte is right."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fakes import NAMES, Watcher, content, go, kept_in, manifest_of, stopping_at

from detgen.outputs.folder import ASIDE
from detgen.outputs.store import STORE

PAGE = 4096


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stopped run of 60 prompts, the whole run beside it, and the prompts."""
    place = tmp_path_factory.mktemp("stopped")
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {n}", "max_tokens": 30}) + "\n" for n in range(60)))
    go(path, place / "whole")
    go(path, place / "out", build=stopping_at(25))
    assert 20 < kept_in(place / "out") < 60
    return place


def resumed(stopped: Path, tmp_path: Path, change: Callable[[Path], object]) -> tuple[int, list[str]]:
    """How many samples a resume takes after a change of the store, and what it says; its bytes are right."""
    out, watcher = tmp_path / "out", Watcher()
    shutil.copytree(stopped / "out", out)
    change(out / STORE)
    summary = go(stopped / "prompts.jsonl", out, watcher)
    assert summary.status == "finished"
    assert summary.resumed + summary.fresh.samples == 60
    assert content(out) == content(stopped / "whole")
    assert {path.name for path in out.iterdir()} - {ASIDE} == set(NAMES)
    assert manifest_of(out)["summary"] == manifest_of(stopped / "whole")["summary"]
    with sqlite3.connect(out / STORE) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    shutil.rmtree(out)
    return summary.resumed, watcher.messages


def flipped(at: int, bit: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        path.write_bytes(data)

    return flip


def test_one_bit_of_each_page(stopped: Path, tmp_path: Path) -> None:
    draw = random.Random(4)
    pages = (stopped / "out" / STORE).stat().st_size // PAGE
    all_there = kept_in(stopped / "out")
    aside = single = 0
    for page in range(pages):
        for low, high in ((0, 12), (12, 100), (100, PAGE)):
            at = page * PAGE + draw.randrange(low, high)
            taken, messages = resumed(stopped, tmp_path, flipped(at, draw.randrange(8)))
            said = " ".join(messages)
            if ASIDE in said:
                aside += 1
                assert f"{taken:,} finished sample" in said
                assert taken > 0 or page == 0 or low == 0, "what other pages have is taken"
            elif taken < all_there:
                single += 1
                assert taken >= all_there - 3
                assert "damaged, and generated again" in said or low == 12, "or it is not found by its key"
    assert aside > 5
    assert single > 0


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.7, 0.99])
def test_a_store_that_was_cut(stopped: Path, tmp_path: Path, share: float) -> None:
    size = (stopped / "out" / STORE).stat().st_size
    taken, messages = resumed(stopped, tmp_path, lambda path: path.write_bytes(path.read_bytes()[: int(share * size)]))
    assert (ASIDE in " ".join(messages)) == (share > 0), "an empty file is a new store"
    if share > 0.9:
        assert taken > 0


def test_the_store_of_another_run(stopped: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "prompt 3", "max_tokens": 30}\n{"prompt": "x"}\n')
    go(other, tmp_path / "other")
    taken, messages = resumed(stopped, tmp_path, lambda path: shutil.copy(tmp_path / "other" / STORE, path))
    assert taken == 1, "a sample is what its key says, whoever made it"
    assert len(messages) == 1


def _diary(path: Path) -> None:
    path.write_text("Dear diary, this is no database.\n" * 500)


def _another_programs(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")


def _of_another_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize("change", [_diary, _another_programs, _of_another_version])
def test_something_else_in_its_place_is_set_aside(
    stopped: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    _, messages = resumed(stopped, tmp_path, change)
    assert f"set aside as {ASIDE}" in messages[0]


def test_what_is_set_aside_stays_until_it_is_overwritten(stopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped / "out", out)
    _diary(out / STORE)
    before = (out / STORE).read_bytes()
    go(stopped / "prompts.jsonl", out)
    assert (out / ASIDE).read_bytes() == before
    assert go(stopped / "prompts.jsonl", out).status == "already finished"
    go(stopped / "prompts.jsonl", out, overwrite=True)
    assert not (out / ASIDE).exists()


def test_a_run_that_is_killed_while_it_sets_aside_has_all_the_same(stopped: Path, tmp_path: Path) -> None:
    """The new store is whole before the damaged one goes."""

    def killed(path: Path) -> None:
        shutil.copy(path, path.with_name(f"{STORE}.tmp"))
        path.rename(path.with_name(ASIDE))
        path.with_name(f"{STORE}-wal").write_bytes(b"of the damaged one")

    taken, _ = resumed(stopped, tmp_path, killed)
    assert taken == kept_in(stopped / "out")
