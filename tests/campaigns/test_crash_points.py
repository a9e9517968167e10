"""A run that dies at its k-th operation on files, for every k: the same call goes on to the same bytes.

A child process dies at the very operation, without a chance to clean up. Three ways to die: before the operation; in
the middle of a write; and with the machine, which costs whatever was not fsynced.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import detgen.outputs.journal
import pytest
from helpers.fakes import NAMES, FakeEngine, content, go, manifest_of, stopping_at

from detgen.engine.config import EngineConfig
from detgen.outputs import read_entries
from detgen.outputs.folder import FORMER

pytestmark = pytest.mark.slow

Death = Literal["killed", "torn", "power"]
DIED = 9

LINES = "\n".join(
    (
        *(f'{{"prompt": "prompt {n}", "n": {1 + n % 3}}}' for n in range(7)),
        "{broken",
        '{"prompt": "overflow 1", "n": 3}',
        '{"prompt": "too long"}',
        '{"prompt": "overflow 0"}',
        '{"prompt": "last", "logprobs": 1, "task": "\\ud800"}',
    )
)


@dataclass
class Disk:
    """Counts a process's operations on files, and ends it at one of them.

    Attributes:
        folder: where files are lost.
        fatal: the operation to die at; beyond the last one it only counts.
        death: in which way.
        seed: of where a write is torn, and of what a power cut leaves.
    """

    folder: Path
    fatal: int
    death: Death
    seed: int
    count: int = 0
    synced: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes on the disk, by device and inode
    written: set[tuple[int, int]] = field(default_factory=set)
    unsynced: set[tuple[int, int]] = field(default_factory=set)  # whose names may be lost

    def install(self) -> None:
        """Replace the operations in this process, for good."""
        real = {name: getattr(os, name) for name in _CHANGING}
        self.synced = dict(self._files().values())
        self._real = real

        def wrap(name: str) -> Callable[..., Any]:
            def operation(*args: Any, **kwargs: Any) -> Any:
                if name != "open" or args[1] & os.O_CREAT:
                    self._count(name, args)
                if name == "replace" and (self.folder / args[1]).exists():
                    self.unsynced.discard(self._files()[self.folder / args[0]][0])  # if lost, the former file is back
                done = real[name](*args, **kwargs)
                self._note(name, args, done)
                return done

            return operation

        for name in _CHANGING:
            setattr(os, name, wrap(name))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        self.count += 1
        if self.count <= self.fatal:
            return
        if self.death == "torn" and name == "write" and len(args[1]):
            self._real["write"](args[0], bytes(args[1])[: random.Random(self.seed).randrange(len(args[1]))])
        if self.death == "power":
            self._lose()
        os._exit(DIED)

    def _files(self) -> dict[Path, tuple[tuple[int, int], int]]:
        """The files of the folder, each with device, inode and size."""
        found = {path: path.stat() for path in self.folder.glob("*")}
        return {path: ((each.st_dev, each.st_ino), each.st_size) for path, each in found.items()}

    def _note(self, name: str, args: tuple[Any, ...], done: Any) -> None:
        if (name == "open" and args[1] & os.O_CREAT) or name in ("write", "ftruncate"):
            found = os.fstat(done if name == "open" else args[0])
            key = found.st_dev, found.st_ino
            self.written.add(key)
            if name == "open" and args[1] & os.O_EXCL:
                self.unsynced.add(key)
        elif name == "fsync":
            found = os.fstat(args[0])
            if stat.S_ISDIR(found.st_mode):
                self.unsynced.clear()
            else:
                self.synced[found.st_dev, found.st_ino] = found.st_size

    def _lose(self) -> None:
        """Leave of each file what was fsynced, then anything: a part of the rest, or zeros; and not every new name."""
        draw = random.Random(self.seed)
        for path, (key, size) in sorted(self._files().items()):
            kept = self.synced.get(key, 0)
            if key in self.written and kept < size:
                os.truncate(path, draw.randint(kept, size))
                if draw.random() < 0.3:
                    os.truncate(path, size)  # a file system may know the size and not the blocks
            if key in self.unsynced and draw.random() < 0.5:
                self._real["unlink"](path)


_CHANGING = ("open", "write", "fsync", "replace", "unlink", "ftruncate", "mkdir", "rmdir")


def died(action: Callable[[], object], disk: Disk, log: Path) -> bool:
    """Whether the action dies in a child process, rather than coming to its end; `disk.count` says how far it came.

    Raises:
        AssertionError: it failed in another way; with the traceback.
    """
    pid = os.fork()
    if not pid:
        try:
            disk.install()
            action()
            log.write_text(str(disk.count))
        except BaseException:
            log.write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, DIED), log.read_text()
    if not status:
        disk.count = int(log.read_text())
    return status == DIED


@dataclass(frozen=True)
class Scenario:
    """A folder to begin with, and the call that is to survive."""

    name: str
    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    sync_seconds: float = 0.0
    kept: bool = True  # whether every sample of the output file is in the journal at all times


def _not_kept(out: Path) -> set[bytes]:
    """The lines of samples that are in the output file of an unfinished run, and not in its journal."""
    if not (out / "outputs.jsonl").exists() or manifest_of(out)["status"] == "finished":
        return set()
    there = {line for line in (out / "outputs.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")}
    journal = out / "journal.jsonl"
    kept = {entry.output for entry in read_entries(journal)} if journal.exists() else set()
    return {line for line in there - kept if b'"error"' not in line}


def _scenarios(prompts: Path, whole: Path) -> Iterator[Scenario]:
    def nothing(out: Path) -> None:
        pass

    def interrupted(out: Path) -> None:
        go(prompts, out, build=stopping_at(4))

    def damaged(out: Path) -> None:
        interrupted(out)
        journal = bytearray((out / "journal.jsonl").read_bytes())
        journal[journal.index(b'"tokens"')] ^= 1
        (out / "journal.jsonl").write_bytes(journal)

    def finished(out: Path) -> None:
        shutil.copytree(whole, out)

    def finished_with_journal(out: Path) -> None:
        finished(out)
        (out / "journal.jsonl").write_text("left by a crash")

    def run(out: Path) -> None:
        go(prompts, out)

    def piped(out: Path) -> None:
        sys.stdin = SimpleNamespace(buffer=io.BytesIO(prompts.read_bytes()), isatty=lambda: False)  # type: ignore[assignment]
        go("-", out)

    def meddled(out: Path) -> None:
        def build(config: EngineConfig) -> FakeEngine:
            engine = FakeEngine(config)
            engine.on_step = lambda step: [(out / name).unlink() for name in MEDDLED] and None if step == 5 else None
            return engine

        go(prompts, out, build=build)

    def of_other_prompts() -> Path:
        other = prompts.with_name("other.jsonl")
        other.write_text("\n".join([*LINES.splitlines()[4:2:-1], '{"prompt": "gone"}', *LINES.splitlines()[5:]]))
        return other

    def others_finished(out: Path) -> None:
        go(of_other_prompts(), out)

    def others_interrupted(out: Path) -> None:
        go(of_other_prompts(), out, build=stopping_at(4))

    yield Scenario("fresh", nothing, run)
    yield Scenario("fresh, fsynced in groups", nothing, run, 60.0)
    yield Scenario("resumed", interrupted, run)
    yield Scenario("resumed, fsynced in groups", interrupted, run, 60.0)
    yield Scenario("resumed from a damaged journal", damaged, run, kept=False)
    yield Scenario("overwriting", finished, lambda out: go(prompts, out, overwrite=True))
    yield Scenario("finished before", finished_with_journal, run)
    yield Scenario("into a finished run of other prompts", others_finished, run, kept=False)
    yield Scenario("into an interrupted run of other prompts", others_interrupted, run, kept=False)
    yield Scenario("piped", nothing, piped)
    yield Scenario("meddled with", nothing, meddled, kept=False)


MEDDLED = ("outputs.jsonl", "journal.jsonl")


def test_a_run_that_dies_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: Callable[[int], int], tally: Callable[..., None]
) -> None:
    prompts, whole, log = tmp_path / "prompts.jsonl", tmp_path / "whole", tmp_path / "log"
    prompts.write_text(LINES)
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # put back at the end
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    go(prompts, whole)
    expected = content(whole)
    piped = {name: data.replace(b'"prompts.jsonl:', b'"stdin:') for name, data in expected.items()}

    points: list[tuple[Scenario, int, Death]] = []
    for scenario in _scenarios(prompts, whole):
        out = tmp_path / "counted"
        scenario.prepare(out)
        monkeypatch.setattr(detgen.outputs.journal, "SYNC_SECONDS", scenario.sync_seconds)
        disk = Disk(out, sys.maxsize, "killed", 0)
        assert not died(lambda scenario=scenario, out=out: scenario.act(out), disk, log)  # type: ignore[misc]
        shutil.rmtree(out)
        points += [(scenario, at, death) for at in range(disk.count) for death in ("killed", "torn", "power")]

    draw = random.Random(13)
    chosen = draw.sample(points, min(tries(1000), len(points)))
    deaths = again = 0
    for number, (scenario, at, death) in enumerate(chosen):
        out = tmp_path / f"out{number}"
        scenario.prepare(out)
        monkeypatch.setattr(detgen.outputs.journal, "SYNC_SECONDS", scenario.sync_seconds)

        def act(scenario: Scenario = scenario, out: Path = out) -> None:
            scenario.act(out)

        assert died(act, Disk(out, at, death, number), log)
        deaths += 1
        if scenario.kept and death != "power":
            assert not _not_kept(out), f"{scenario.name}, {death} at operation {at}"
        while draw.random() < 0.5 and died(
            act, Disk(out, draw.randrange(90), draw.choice(("killed", "torn", "power")), number), log
        ):
            again += 1
        scenario.act(out)
        wrong = f"{scenario.name}, {death} at operation {at}"
        assert content(out) == (piped if scenario.name == "piped" else expected), wrong
        assert manifest_of(out)["status"] == "finished", wrong
        left = {path.name for path in out.iterdir()} - {*NAMES, "stdin.jsonl"}
        if "other prompts" in scenario.name:
            left -= {FORMER}  # samples that no prompt asks for any more
        assert not left, f"{wrong}: {left}"
        shutil.rmtree(out)
    tally(crash_points=len(points), tried=deaths, in_resumptions_of_these=again, differing=0, tracebacks=0)
