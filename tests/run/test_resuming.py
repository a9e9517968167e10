"""Interruption and resumption: whatever ended a run, the same call goes on to the same bytes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fakes import FakeEngine, Watcher, config, content, go, kept_in, manifest_of, stopping_at

from detgen.engine.config import EngineConfig
from detgen.params import SamplingParams
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
    kept = kept_in(out)
    second = go(prompts, out, watcher)
    assert watcher.messages == [f"resuming {out}: {kept} finished samples kept"]
    assert second.status == "finished"
    assert second.resumed == kept > 0
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


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {n}", "n": 1 + n % 2}) + "\n" for n in range(300)))
    go(path, tmp_path / "whole")
    out = tmp_path / "out"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from helpers import fakes as t;"
        "import detgen.outputs.writer as w; w.SPARING = 0;"
        f"t.go({str(path)!r}, t.Path({str(out)!r}), build=lambda c: t.FakeEngine(c, pause=0.002))"
    )
    moments = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", code])
        target = (0 if not out.exists() else kept_in(out)) * 150 + moments.randint(1, 8_000)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and child.poll() is None:
            with suppress(FileNotFoundError):  # a run that goes on writes another one in its place
                if (out / "outputs.jsonl").stat().st_size > target:
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


@pytest.mark.parametrize(
    ("limit", "sparing", "tokens", "repeated"), [(100_000, 0, 30, 9), (300_000, 50, 1, 3000)], ids=["store", "outputs"]
)
def test_a_full_disk_ends_the_run_and_the_same_command_resumes_it(
    tmp_path: Path, limit: int, sparing: int, tokens: int, repeated: int
) -> None:
    """By a limit on the size of a file, in a process of its own: SQLite writes by itself."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"prompt": f"p {n}", "task": "t" * repeated}) + "\n" for n in range(300)))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from helpers import fakes as t;"
        f"import resource, detgen.outputs.writer as w; w.SPARING = {sparing};"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        f"t.go({str(path)!r}, t.Path({str(out)!r}), params=t.SamplingParams(max_tokens={tokens}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(rf"RunError: cannot (use|write) .*{'samples' if sparing == 0 else 'outputs'}", done.stderr)
    assert "run the same command again to resume" in done.stderr
    asked = SamplingParams(max_tokens=tokens)
    assert go(path, out, params=asked).resumed > 0
    go(path, tmp_path / "whole", params=asked)
    assert content(out) == content(tmp_path / "whole")
