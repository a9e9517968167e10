"""A run with a completion cache: only what is new is generated, and the bytes are those of a fresh run."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.examples import examples
from helpers.fakes import FakeEngine, Watcher, config, content, go, manifest_of, no_engine, stopping_at
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.errors import RunError
from detgen.outputs import identity
from detgen.outputs import store as stores
from detgen.outputs.store import STORE
from detgen.params import SamplingParams
from detgen.run import RunSummary, run

Line = dict[str, Any]


def write(path: Path, records: Iterable[Line | str]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


class Generating(FakeEngine):
    """Notes which samples it is asked for."""

    asked: list[tuple[str | int, int]]

    def __init__(self, config: EngineConfig, observer: Any = None, **named: Any) -> None:
        super().__init__(config, **named)
        self.asked = []

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        def noted() -> Iterator[Request]:
            for request in requests:
                self.asked += [(request.id, sample) for sample in request.wanted]
                yield request

        yield from super().stream(noted())


def generated(prompts: Path, out: Path, cache: Path | None, watcher: Watcher | None = None, **changes: Any) -> int:
    """How many samples a run into a new folder generates; its bytes are those of a run without a cache."""
    engines: list[Generating] = []

    def build(config: EngineConfig) -> Generating:
        engines.append(Generating(config))
        return engines[-1]

    summary = go(prompts, out, watcher, build=build, cache=cache, **changes)
    fresh = go(prompts, out.with_name(f"{out.name}-fresh"), **changes)
    assert content(out) == content(out.with_name(f"{out.name}-fresh"))
    assert manifest_of(out)["summary"] == manifest_of(out.with_name(f"{out.name}-fresh"))["summary"]
    assert summary.written == fresh.written
    assert summary.reused + summary.fresh.samples == summary.written.samples
    asked = [key for engine in engines for key in engine.asked]
    assert len(set(asked)) == len(asked)
    return len(asked)


def test_of_2100_prompts_the_110_new_ones_are_generated(tmp_path: Path) -> None:
    first = [{"id": n, "prompt": f"prompt {n}", "task": n} for n in range(2000)]
    cache = tmp_path / "cache"
    assert generated(write(tmp_path / "a.jsonl", first), tmp_path / "a", cache, batch_size=64) == 2000
    draw = random.Random(3)
    second = first + [{"id": n, "prompt": f"prompt {n}", "task": n} for n in range(2000, 2100)]
    for place in draw.sample(range(2000), 10):
        second[place] = second[place] | {"prompt": f"edited {place}"}
    draw.shuffle(second)
    watcher = Watcher()
    assert generated(write(tmp_path / "b.jsonl", second), tmp_path / "b", cache, watcher, batch_size=64) == 110
    assert watcher.messages == []
    assert "1,990 reused" in watcher.reports[-1].figures


def test_what_is_not_in_the_key_does_not_matter_and_all_else_does(tmp_path: Path) -> None:
    base = {"prompt": "p", "temperature": 1, "seed": 3}
    cache = tmp_path / "cache"
    assert generated(write(tmp_path / "a.jsonl", [base]), tmp_path / "a", cache) == 1
    same = [base | {"id": "x"}, base | {"task": [1, {"b": 2}]}, base | {"temperature": 1.0}]
    assert generated(write(tmp_path / "b.jsonl", same), tmp_path / "b", cache, batch_size=9, echo=True) == 0
    other = [
        {"max_tokens": 2}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"seed": 4},
        {"stop": ["x"]}, {"logprobs": 1}, {"min_tokens": 1}, {"stop_token_ids": [7]}, {"ignore_eos": True},
        {"repetition_penalty": 1.5}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1}},
        {"prompt": "q"}, {"prompt": "P"}, {"prompt": "p "},
    ]  # fmt: skip
    others = [base | change for change in other]
    others.append({"messages": [{"role": "user", "content": "p"}], "temperature": 1, "seed": 3})
    others.append({"prompt_token_ids": [112], "temperature": 1, "seed": 3})
    assert generated(write(tmp_path / "c.jsonl", others), tmp_path / "c", cache) == len(others)


def test_the_order_of_the_keys_of_a_tool_is_a_difference(tmp_path: Path) -> None:
    def chat(*keys: str) -> Line:
        tool = {"type": "function", "function": {key: key for key in keys}}
        return {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}

    cache = tmp_path / "cache"
    assert generated(write(tmp_path / "a.jsonl", [chat("name", "description")]), tmp_path / "a", cache) == 1
    assert generated(write(tmp_path / "b.jsonl", [chat("description", "name")]), tmp_path / "b", cache) == 1
    assert generated(write(tmp_path / "c.jsonl", [chat("name", "description")]), tmp_path / "c", cache) == 0


def test_another_n_and_another_limit_generate_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"prompt {n}"} for n in range(8)])
    cache = tmp_path / "cache"

    def params(n: int) -> SamplingParams:
        return SamplingParams(max_tokens=3, temperature=1.0, n=n)

    assert generated(path, tmp_path / "a", cache, params=params(2), limit=5) == 10
    assert generated(path, tmp_path / "b", cache, params=params(3), limit=6) == 5 + 3
    assert generated(path, tmp_path / "c", cache, params=params(1)) == 2
    assert generated(path, tmp_path / "d", cache, params=params(3)) == 4


def test_errors_are_tried_again_and_bad_lines_stay(tmp_path: Path) -> None:
    records = ['{"prompt": 3}', "{broken", {"prompt": "overflow 1", "n": 3}, {"prompt": "too long"}, {"prompt": "x"}]
    path = write(tmp_path / "a.jsonl", records)
    assert generated(path, tmp_path / "a", tmp_path / "cache") == 5
    engines = []

    def build(config: EngineConfig) -> Generating:
        engines.append(Generating(config))
        return engines[-1]

    go(path, tmp_path / "b", build=build, cache=tmp_path / "cache")
    assert sorted(engines[0].asked) == [(3, 1), (4, 0)]
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_unverified_requests_are_neither_kept_nor_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "deterministic": False}, {"prompt": "b"}])
    assert generated(path, tmp_path / "a", tmp_path / "cache") == 2
    assert generated(path, tmp_path / "b", tmp_path / "cache") == 1


def test_another_profile_finds_nothing(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    go(prompts, tmp_path / "a", cache=cache)
    assert go(prompts, tmp_path / "b", build=lambda c: FakeEngine(c, device="cuda"), cache=cache).reused == 0
    version = identity.importlib.metadata.version
    monkeypatch.setattr(identity.importlib.metadata, "version", lambda p: version(p) + "x" * (p == "tokenizers"))
    assert go(prompts, tmp_path / "c", cache=cache).reused == 0
    monkeypatch.undo()
    assert go(prompts, tmp_path / "d", cache=cache).reused == 15


def test_what_the_folder_has_is_not_taken_from_the_cache(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "a", cache=tmp_path / "cache")
    interrupted = go(prompts, tmp_path / "b", build=stopping_at(4))
    assert interrupted.status == "interrupted"
    summary = go(prompts, tmp_path / "b", cache=tmp_path / "cache")
    assert summary.resumed > 0
    assert summary.reused == 15 - summary.resumed
    assert summary.fresh.samples == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_a_resume_needs_no_cache(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "a", cache=tmp_path / "cache", limit=8)
    interrupted = go(prompts, tmp_path / "b", build=stopping_at(1), cache=tmp_path / "cache")
    assert interrupted.reused > 0
    summary = go(prompts, tmp_path / "b")
    assert summary.resumed >= interrupted.reused
    go(prompts, tmp_path / "whole")
    assert content(tmp_path / "b") == content(tmp_path / "whole")


def damage(path: Path, places: Iterable[int]) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0x10]))


def test_a_damaged_completion_is_generated_again_and_replaced(tmp_path: Path, prompts: Path) -> None:
    cache = tmp_path / "cache"
    go(prompts, tmp_path / "a", cache=cache)
    with sqlite3.connect(cache / STORE) as db:
        db.execute("UPDATE packed SET value = substr(value, 1, 20) || x'00' || substr(value, 22) WHERE id IN (2, 5)")
        db.execute("DELETE FROM packed WHERE id = 7")
    watcher = Watcher()
    summary = go(prompts, tmp_path / "b", watcher, cache=cache)
    assert summary.fresh.samples == 3
    assert watcher.messages == [f"{cache / STORE}: 3 samples were damaged, and generated again"]
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert go(prompts, tmp_path / "c", watcher, cache=cache).fresh.samples == 0


@examples(40)
@given(data=st.data())
def test_no_damage_to_the_file_makes_an_output_wrong(data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        path = write(folder / "p.jsonl", [{"prompt": f"prompt {n}"} for n in range(12)])
        go(path, folder / "a", cache=folder / "cache")
        database = folder / "cache" / STORE
        size = database.stat().st_size
        if data.draw(st.booleans()):
            with database.open("r+b") as file:
                file.truncate(data.draw(st.integers(0, size)))
        else:
            damage(database, data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30)))
        summary = go(path, folder / "b", cache=folder / "cache")
        assert summary.reused + summary.fresh.samples == 12
        assert content(folder / "a") == content(folder / "b")


def _text(path: Path) -> None:
    path.write_text("Dear diary, this is no database.\n" * 9)


def _other_database(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")


def same_as_without(tmp_path: Path, prompts: Path, cache: Path) -> tuple[RunSummary, list[str]]:
    watcher = Watcher()
    summary = go(prompts, tmp_path / "out", watcher, cache=cache)
    go(prompts, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert len(watcher.messages) == 1
    return summary, watcher.messages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_text, f"{STORE} is not a store of detgen; name another folder, or move it"),
        (_other_database, f"{STORE} is another program's database; name another folder"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(4080)), f"{STORE} is not a store of detgen"),
        (Path.mkdir, f"{STORE} is not a file"),
        (os.mkfifo, f"{STORE} is not a file"),
        (lambda path: path.symlink_to(path.parent.parent / "missing"), f"{STORE} is not a file"),
        (lambda path: os.mkfifo(f"{path}-journal"), f"{STORE}-journal is not a file"),
        (lambda path: Path(f"{path}-wal").mkdir(), f"{STORE}-wal is not a file"),
        (lambda path: Path(f"{path}-shm").symlink_to(path.parent.parent / "missing"), f"{STORE}-shm is not a file"),
    ],
)
def test_something_else_in_its_place_is_left_alone_and_no_obstacle(
    tmp_path: Path, prompts: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "cache" / STORE
    path.parent.mkdir()
    make(path)
    before = _listed(tmp_path / "cache")
    _, (said,) = same_as_without(tmp_path, prompts, path.parent)
    assert message in said
    assert said.endswith(". The run goes on without it")
    assert _listed(tmp_path / "cache") == before
    assert not (tmp_path / "missing").exists()


def _listed(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What is in a folder: modes, and contents of files."""
    return {p.name: (p.lstat().st_mode, p.read_bytes() if p.is_file() else b"") for p in folder.iterdir()}


def test_a_place_that_cannot_be_a_cache_is_no_obstacle(tmp_path: Path, prompts: Path) -> None:
    before = prompts.read_bytes()
    _, (said,) = same_as_without(tmp_path, prompts, prompts)
    assert "prompts.jsonl is a file, and a cache is a folder; name another place. The run goes on" in said
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("named", ["missing", "cache"])
def test_a_link_to_nothing_in_the_place_of_the_folder_is_not_followed(
    tmp_path: Path, prompts: Path, named: str
) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / named)
    _, (said,) = same_as_without(tmp_path, prompts, tmp_path / "cache")
    assert said.startswith(f"cannot make the folder {tmp_path / 'cache'} of the cache: ")
    assert not (tmp_path / "missing").exists()


def test_a_cache_in_the_output_folder_is_refused(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(RunError, match="the cache cannot be in the output folder"):
        go(prompts, tmp_path / "out", build=no_engine, cache=tmp_path / "x" / ".." / "out")


@pytest.mark.parametrize("place", ["/proc/detgen", "a" * 300])
def test_a_cache_that_cannot_be_made_is_no_obstacle(tmp_path: Path, prompts: Path, place: str) -> None:
    _, (said,) = same_as_without(tmp_path, prompts, Path(place))
    assert said.startswith(f"cannot make the folder {place} of the cache: ")
    assert said.endswith(". The run goes on without it")


def test_a_cache_of_another_schema_is_no_obstacle(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "a", cache=tmp_path / "cache")
    with sqlite3.connect(tmp_path / "cache" / STORE) as db:
        db.execute("PRAGMA user_version = 99")
    summary, (said,) = same_as_without(tmp_path, prompts, tmp_path / "cache")
    assert summary.reused == 0
    assert "was made by another version of detgen; name another folder, or delete it. The run goes on" in said


def with_pragma(monkeypatch: pytest.MonkeyPatch, pragma: str) -> None:
    prepare = stores.Store._prepare

    def prepared(self: stores.Store) -> None:
        prepare(self)
        if not self._lone:
            self.db.execute(f"PRAGMA {pragma}").fetchall()

    monkeypatch.setattr(stores.Store, "_prepare", prepared)


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [("max_page_count = 1", "database or disk is full; free some space"), ("query_only = ON", "make it writable")],
)
def test_a_cache_that_cannot_be_written_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pragma: str, reason: str
) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"prompt {n}"} for n in range(60)])
    go(path, tmp_path / "a", cache=tmp_path / "cache", limit=30)
    with_pragma(monkeypatch, pragma)
    summary, (said,) = same_as_without(tmp_path, path, tmp_path / "cache")
    assert reason in said
    assert said.endswith("The run goes on, and what it makes is not kept there")
    assert summary.reused == 30


def test_a_locked_cache_is_no_obstacle(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(prompts, tmp_path / "a", cache=tmp_path / "cache", limit=4)
    monkeypatch.setattr(stores, "_PATIENCE", 0.05)
    other = sqlite3.connect(tmp_path / "cache" / STORE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    summary, (said,) = same_as_without(tmp_path, prompts, tmp_path / "cache")
    assert "another process keeps it locked; wait for that. The run goes on, and what it makes is not kept" in said
    assert summary.reused == 3
    other.close()


def test_a_process_finds_what_another_one_makes_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"prompt {n}"} for n in range(40)])

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: (
            go(path, tmp_path / "other", cache=tmp_path / "cache") and None if step == 3 else None
        )
        return engine

    summary = go(path, tmp_path / "out", build=build, cache=tmp_path / "cache")
    assert summary.reused > 20
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_a_killed_process_costs_a_shared_cache_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"prompt {n}", "n": 1 + n % 2} for n in range(300)])
    go(path, tmp_path / "whole")
    cache, code = tmp_path / "cache", (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from helpers import fakes as t;"
        f"t.go({str(path)!r}, t.Path(sys.argv[1]), build=lambda c: t.FakeEngine(c, pause=0.002),"
        f" cache=t.Path({str(tmp_path / 'cache')!r}))"
    )  # fmt: skip

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)])

    def kept() -> int:
        if not (cache / STORE).exists():
            return 0
        db = sqlite3.connect(cache / STORE)
        try:
            return int(db.execute("SELECT count(*) FROM entries JOIN packed USING (id)").fetchone()[0])
        except sqlite3.OperationalError:  # the other process is making it
            return 0
        finally:
            db.close()

    moments = random.Random(11)
    lasting = start("lasting")
    victims = 0
    while lasting.poll() is None and victims < 4:
        victim, aim = start(f"victim {victims}"), kept() + moments.randint(10, 60)
        while kept() < aim and victim.poll() is None and lasting.poll() is None:
            time.sleep(0.002)
        victim.kill()
        assert victim.wait() in (0, -signal.SIGKILL)
        victims += 1
    assert lasting.wait() == 0
    assert content(tmp_path / "lasting") == content(tmp_path / "whole")
    assert kept() == 450
    summary = go(path, tmp_path / "again", cache=cache)
    assert (summary.reused, summary.fresh.samples) == (450, 0)
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    for victim in range(victims):
        folder = tmp_path / f"victim {victim}"
        assert go(path, folder, cache=cache).fresh.samples == 0, "what was in its store was in the cache"
        assert content(folder) == content(tmp_path / "whole")


def test_auto_is_the_users_cache(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run(replace(config(prompts, tmp_path / "a"), cache="auto"), Watcher(), build_engine=FakeEngine)
    assert (tmp_path / "xdg" / "detgen" / STORE).is_file()
    assert (tmp_path / "xdg" / "detgen").stat().st_mode & 0o077 == 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    go(prompts, tmp_path / "b", cache="auto")
    assert (tmp_path / "home" / ".cache" / "detgen" / STORE).is_file()


_records = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["a", "b", "c", "d", "overflow 0", "too long", "overflow 1 2", "é\u2028"])},
    optional={
        "n": st.integers(1, 3),
        "id": st.integers(0, 3),
        "seed": st.integers(0, 1),
        "logprobs": st.just(1),
        "task": st.text(max_size=2),
        "deterministic": st.just(False),
    },
)


@examples(30)
@given(inputs=st.lists(st.lists(_records, min_size=1, max_size=8), min_size=2, max_size=4), folder=st.booleans())
def test_any_edits_give_the_bytes_of_a_fresh_run(inputs: list[list[Line]], folder: bool) -> None:
    """Through a cache, each into a new folder; or into one folder."""
    with TemporaryDirectory() as place:
        home = Path(place)
        for number, records in enumerate(inputs):
            path = write(home / "p.jsonl", records)
            go(path, home / f"fresh {number}")
            out = home / ("out" if folder else f"out {number}")
            go(path, out, cache=None if folder else home / "cache")
            assert content(out) == content(home / f"fresh {number}")


def test_a_chat_with_the_day_in_it_is_of_that_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chat templates print the date: tomorrow the chat is another prompt. A text stays the same."""

    def dated(config: EngineConfig) -> FakeEngine:
        return FakeEngine(config, device="dated")

    chat = {"messages": [{"role": "user", "content": "hi"}]}
    path, cache = write(tmp_path / "p.jsonl", [chat, {"prompt": "x"}]), tmp_path / "cache"
    go(path, tmp_path / "a", build=dated, cache=cache)
    assert go(path, tmp_path / "b", build=dated, cache=cache).reused == 2
    write(path, [{"prompt": "x"}, chat])
    assert go(path, tmp_path / "b", build=dated).resumed == 2
    another_day = type("Day", (date,), {"today": staticmethod(lambda: date(2001, 1, 1))})
    monkeypatch.setattr("detgen.outputs.samples.date", another_day)
    assert go(path, tmp_path / "c", build=dated, cache=cache).reused == 1


def test_a_run_that_goes_on_is_of_its_first_day(tmp_path: Path) -> None:
    def dated(config: EngineConfig) -> FakeEngine:
        return FakeEngine(config, device="dated")

    path, out = write(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}]), tmp_path / "out"
    go(path, out, build=dated)
    (out / STORE).unlink()
    stopped = manifest_of(out) | {"status": "running", "created": "2001-01-01T12:00:00+00:00"}
    del stopped["files"], stopped["summary"]
    for resumed in (0, 1):
        (out / "manifest.json").write_text(json.dumps(stopped))
        assert go(path, out, build=dated).resumed == resumed
    write(path, [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "x"}])
    assert go(path, out, build=dated).resumed == 0, "other prompts are asked today"
