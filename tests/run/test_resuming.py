"""Interruption and resumption: whatever ended a run, the same call goes on to the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import NAMES, FakeEngine, Watcher, config, content, go, manifest_of, stopping_at

from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.errors import RunError
from detgen.run import RunSummary, run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_at_the_next_step_and_the_rest_is_resumed(tmp_path: Path, prompts: Path, number: int) -> None:
    go(prompts, tmp_path / "whole")
    out = tmp_path / "out"
    watcher = Watcher()
    handler = signal.getsignal(number)

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: os.kill(os.getpid(), number) if step == 6 else None
        return engine

    first = go(prompts, out, watcher, build=build)
    assert signal.getsignal(number) is handler
    assert (first.status, first.sha256) == ("interrupted", None)
    assert 0 < first.written.prompts < 16
    assert first.target_passes == 6
    assert watcher.reports[-1].done < 16
    kept = (out / "journal.jsonl").read_bytes().count(b'{"crc32"')
    second = go(prompts, out, watcher)
    assert watcher.messages == [f"resuming {out}: {kept} finished samples kept"]
    assert second.status == "finished"
    assert 0 < second.resumed <= kept
    assert second.resumed + second.fresh.tokens // 3 == second.written.samples == 15
    assert content(out) == content(tmp_path / "whole")


def test_a_second_signal_stops_at_once(tmp_path: Path, prompts: Path) -> None:
    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] and None
        return engine

    with pytest.raises(KeyboardInterrupt):
        go(prompts, tmp_path / "out", build=build)
    go(prompts, tmp_path / "out")
    go(prompts, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_run_outside_the_main_thread_leaves_signals_alone(tmp_path: Path, prompts: Path) -> None:
    summaries: list[RunSummary] = []
    thread = threading.Thread(target=lambda: summaries.append(go(prompts, tmp_path / "out")))
    thread.start()
    thread.join()
    assert summaries[0].status == "finished"


def test_a_journal_cut_anywhere_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terse(FakeEngine):  # a short journal, since there is a run for each of its bytes
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            for completions in super().stream(requests):
                yield [replace(each, records=each.records[: each.request.index // 2]) for each in completions]

    class Crashing(Terse):
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            yield from super().stream(requests)
            raise MemoryError

    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "n": 2, "max_tokens": 1}\n{"prompt": 1}\n{"prompt": "b", "max_tokens": 1}\n')
    go(path, tmp_path / "whole", build=Terse)
    out = tmp_path / "out"
    with pytest.raises(MemoryError):
        go(path, out, build=Crashing)
    journal = (out / "journal.jsonl").read_bytes()
    manifest = (out / "manifest.json").read_bytes()
    assert journal.count(b'{"crc32"') == 3
    ends = [at + 1 for at, byte in enumerate(journal) if byte == ord("\n")]
    for size in sorted({*range(0, len(journal), 4), *(end + step for end in ends for step in (-1, 0, 1))}):
        (out / "manifest.json").write_bytes(manifest)
        (out / "journal.jsonl").write_bytes(journal[:size])
        for name in NAMES[:2]:  # whatever a crash may have left of them
            (out / name).write_bytes((tmp_path / "whole" / name).read_bytes()[: size % 50])
        assert go(path, out, build=Terse).status == "finished"
        assert content(out) == content(tmp_path / "whole")


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {n}", "n": 1 + n % 2}) + "\n" for n in range(300)))
    go(path, tmp_path / "whole")
    out = tmp_path / "out"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from helpers import fakes as t;"
        f"t.go({str(path)!r}, t.Path({str(out)!r}), build=lambda c: t.FakeEngine(c, pause=0.002))"
    )
    moments = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", code])
        start = (out / "journal.jsonl").stat().st_size if out.exists() else 0
        deadline = time.monotonic() + 30
        target = start + moments.randint(1, 20_000)
        while time.monotonic() < deadline and child.poll() is None:
            if out.exists() and (out / "journal.jsonl").exists() and (out / "journal.jsonl").stat().st_size > target:
                break
            time.sleep(0.001)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    watcher = Watcher()
    summary = go(path, out, watcher)
    assert summary.status == "finished"
    assert 0 < summary.resumed < summary.written.samples
    assert "finished samples kept" in watcher.messages[0]
    assert content(out) == content(tmp_path / "whole")


def test_settings_that_change_no_output_may_change_on_the_way(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    other = EngineConfig(
        batch_size=9,
        drafter="none",
        draft_tokens=2,
        threads=1,
        kv_memory=1 << 20,
        prefix_cache=False,
        speculative_prefill=3,
        draft="other",
    )
    summary = run(replace(config(prompts, out), engine=other), Watcher(), build_engine=FakeEngine)
    assert summary.resumed > 0
    settings = manifest_of(out)["settings"]
    assert (settings["drafter"], settings["prefix_cache"], settings["speculative_prefill"]) == ("none", False, 3)
    go(prompts, tmp_path / "whole")
    assert content(out)["outputs.jsonl"] == content(tmp_path / "whole")["outputs.jsonl"]


def test_a_full_disk_ends_the_run_and_the_same_command_resumes_it(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    left = 6000

    def limited(file: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(file, data[:left])
        left -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(RunError, match="No space left on device; free some space, then run the same command again"):
        go(prompts, tmp_path / "out")
    monkeypatch.undo()
    assert go(prompts, tmp_path / "out").resumed > 0
    go(prompts, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
