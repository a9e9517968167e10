"""Stores that are cut, exchanged, or have a bit changed in a page; disks that are full, read-only, or fail.

The run ends with the same bytes, or is refused in one line; then the same command, on a disk that works, goes on to the
same bytes.
"""

from __future__ import annotations

import copy
import errno
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.crash_scenarios import OTHERS, REFUSED, SCENARIOS, act, run_prompts
from helpers.fakes import FakeEngine, keys_in, stopping_at
from helpers.file_calls import Disk, content_of, crash, environment, library, record

from detgen.errors import OutputError, StoreError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD"),
]

STORE = "samples.sqlite3"
FILES = ("outputs.jsonl", "acceptance.jsonl")
PAGE = 4096
ERRORS = (errno.ENOSPC, errno.ENOSPC, errno.EROFS, errno.EIO)


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder hold these files and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _killed(tmp_path: Path, name: str) -> dict[str, bytes]:
    """A folder whose run was killed, with commits that are in the log of the store and not in the store."""
    folder = tmp_path / "folder"
    _replace(folder, {})
    folder.mkdir()
    SCENARIOS[name].prepare(folder)
    before = Disk(folder)
    calls = record(library(tmp_path), folder, ("-m", "helpers.crash_scenarios", name, str(folder)))
    crash(copy.deepcopy(before), calls, len(calls) * 3 // 4, "killed", 0)
    found = content_of(folder)
    assert found[f"out/{STORE}-wal"]
    return found


def _exchanged(tmp_path: Path, own: bytes) -> Iterator[tuple[str, bytes]]:
    """What may be in the place of a store."""
    other = tmp_path / "other"
    other.mkdir()
    run_prompts(other, OTHERS, build=stopping_at(3))
    yield "that of other prompts", (other / "out" / STORE).read_bytes()
    run_prompts(other, build=lambda config: FakeEngine(config, device="another"), overwrite=True)
    yield "that of another model", (other / "out" / STORE).read_bytes()
    with sqlite3.connect(tmp_path / "strange") as db:
        db.execute("CREATE TABLE entries (id, key)")
    yield "another program's", (tmp_path / "strange").read_bytes()
    yield "nothing", b""
    yield "a text", b"some text\n" * 1000
    yield "zeros", bytes(len(own))
    yield "itself twice", own + own


def _damages(files: dict[str, bytes], path: str, count: int, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """A file cut at so many lengths, and with a bit changed in each of its pages."""
    data = files[path]
    for _ in range(count):
        at = draw.choice((draw.randrange(len(data)), draw.randrange(len(data) // PAGE + 1) * PAGE))
        yield f"{path} cut at {at}", data[:at]
    for page in range(0, len(data), PAGE):
        bit = draw.randrange(8 * min(PAGE, len(data) - page))
        changed = bytearray(data)
        changed[page + bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} of page {page // PAGE} of {path}", bytes(changed)


def _refusal(name: str, folder: Path) -> str | None:
    """Run a scenario; the message if it is refused."""
    try:
        act(name, folder)
    except (OutputError, StoreError) as error:
        return str(error)
    return None


# The run, what was finished before it, and where the store is.
@pytest.mark.parametrize(
    ("name", "finished", "place"),
    [("fresh", "after a run of other prompts", "out"), ("with a cache", "with a filled cache", "cache")],
)
def test_a_damaged_store_costs_no_bytes(
    name: str,
    finished: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tries: Callable[[int], int],
    tally: Callable[..., None],
) -> None:
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    folder, draw, store = tmp_path / "folder", random.Random(34), f"{place}/{STORE}"
    states = {"killed": _killed(tmp_path, name)}
    _replace(folder, {})
    folder.mkdir()
    SCENARIOS[finished].prepare(folder)
    states["finished"] = content_of(folder)
    act(name, folder)
    expected = {file: content_of(folder)[f"out/{file}"] for file in FILES}
    exchanged = list(_exchanged(tmp_path, states["killed"][store]))
    counts = dict.fromkeys(("damages", "same", "refused"), 0)
    for state, files in states.items():
        damages = [(what, {store: data}) for what, data in exchanged]
        for path in (path for path in (store, f"{store}-wal") if files.get(path)):
            damages += [(what, {path: data}) for what, data in _damages(files, path, tries(60), draw)]
        for what, changed in damages:
            _replace(folder, {**files, **changed})
            counts["damages"] += 1
            if (refusal := _refusal(name, folder)) is not None:
                assert place == "out", f"{state}, {what}: {refusal}"  # a run never needs its cache
                assert "\n" not in refusal, f"{state}, {what}"
                counts["refused"] += 1
            else:
                left = content_of(folder)
                assert {file: left[f"out/{file}"] for file in FILES} == expected, f"{state}, {what}"
                counts["same"] += 1
    tally(**counts, differing=0, tracebacks=0)


def test_a_disk_that_fails_costs_nothing_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    folder, draw, shim = tmp_path / "folder", random.Random(7), library(tmp_path)
    counts = dict.fromkeys(("tries", "refused", "finished"), 0)
    for name in ("fresh", "resumed", "after a run of other prompts", "with a cache"):
        _replace(folder, {})
        folder.mkdir()
        SCENARIOS[name].prepare(folder)
        begun = content_of(folder)
        calls = record(shim, folder, ("-m", "helpers.crash_scenarios", name, str(folder)))
        expected, wanted = content_of(folder), keys_in(folder / "out")
        for number in range(max(tries(200) // 4, 1)):
            error, at = draw.choice(ERRORS), 1 if number == 0 else draw.randint(1, len(calls))
            wrong = f"{name}: {errno.errorcode[error]} from call {at} on"
            _replace(folder, begun)
            folder.mkdir(exist_ok=True)
            done = subprocess.run(
                [sys.executable, "-m", "helpers.crash_scenarios", name, str(folder)],
                env=environment(shim, folder, fail=at, error=error),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode in (0, REFUSED), f"{wrong}: {done.stderr}"
            assert "Traceback" not in done.stderr, f"{wrong}: {done.stderr}"
            counts["refused" if done.returncode else "finished"] += 1
            counts["tries"] += 1
            kept = keys_in(folder / "out") & wanted
            summary = act(name, folder)
            if summary.status != "already finished":
                assert len(kept) <= len(wanted) - summary.fresh.samples, wrong
            left = content_of(folder)
            assert all(left[f"out/{file}"] == expected[f"out/{file}"] for file in FILES), wrong
            assert keys_in(folder / "out") == wanted, wrong
    tally(**counts, differing=0, tracebacks=0)


def test_the_command_says_what_is_wrong_with_the_disk(
    tmp_path: Path, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):", "n": 3}\n{"prompt": "import os", "n": 2}\n')
    folder, draw, shim = tmp_path / "folder", random.Random(9), library(tmp_path)
    folder.mkdir()
    command = ["-m", "detgen", "run", str(tmp_path / "prompts.jsonl"), "-o", str(folder / "out"), "--max-tokens=8"]
    command += ["--drafter=none", "--quiet"]
    calls = record(shim, folder, command)
    expected = content_of(folder)
    refused = 0
    for number in range(tries(20)):
        error, at = (errno.EROFS, 1) if number == 0 else (draw.choice(ERRORS), draw.randint(1, len(calls)))
        wrong = f"{errno.errorcode[error]} from call {at} on"
        _replace(folder, {})
        folder.mkdir()
        for environ in (environment(shim, folder, fail=at, error=error), None):
            done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0 or (done.returncode == 2 and environ is not None), f"{wrong}: {done.stderr}"
            assert "Traceback" not in done.stderr, wrong
            if done.returncode:
                refused += 1
                assert done.stderr.startswith("detgen: error: "), wrong
        assert content_of(folder)["out/outputs.jsonl"] == expected["out/outputs.jsonl"], wrong
    tally(tries=tries(20), refused=refused, differing=0, tracebacks=0)
