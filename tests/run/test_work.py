"""While a run goes on: files grow, the input is read no further than need be, memory stays as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers.examples import thorough
from helpers.fakes import NAMES, FakeEngine, Watcher, content, go, lines, manifest_of, stopping_at

import detgen.outputs.writer
import detgen.run.work
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request


def test_both_files_grow_while_the_run_goes_on(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen.outputs.writer, "SPARING", 0)
    out = tmp_path / "out"
    sizes: list[tuple[int, int, str]] = []

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: sizes.append(
            (len(lines(out / NAMES[0])), len(lines(out / NAMES[1])), manifest_of(out)["status"])
        )
        return engine

    go(prompts, out, build=build)
    assert {status for *_, status in sizes} == {"running"}
    assert len({outputs for outputs, *_ in sizes}) > 5
    assert len({log for _, log, _ in sizes}) > 5


def test_the_input_is_not_read_further_than_the_engine_asks(tmp_path: Path, prompts: Path) -> None:
    engines: list[FakeEngine] = []

    def build(config: EngineConfig) -> FakeEngine:
        engines.append(stopping_at(1)(config))
        return engines[-1]

    go(prompts, tmp_path / "out", build=build)
    assert engines[0].pulled <= 4


def test_a_prompt_that_takes_long_bounds_what_waits_for_it(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(prompts, tmp_path / "a")
    monkeypatch.setattr(detgen.outputs.writer, "AHEAD_PROMPTS", 2)
    engines: list[FakeEngine] = []

    def build(config: EngineConfig) -> FakeEngine:
        engines.append(FakeEngine(config))
        return engines[-1]

    go(prompts, tmp_path / "b", build=build)
    assert engines[0].streams > 5
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_time_left_counts_only_what_this_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detgen.run.work, "_REPORT_SECONDS", 0.0)
    path, out, watcher = tmp_path / "prompts.jsonl", tmp_path / "out", Watcher()
    path.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    go(path, out, build=stopping_at(6))
    resumed = go(path, out, watcher, build=lambda config: FakeEngine(config, pause=0.01)).resumed
    assert resumed > 2
    last = [each for each in watcher.reports if each.left is not None][-1]
    assert last.left == pytest.approx((20 - last.done) * last.seconds / (last.done - resumed), rel=0.5)
    assert watcher.reports[-1].done == 20
    assert watcher.reports[-1].left is None


def test_an_engine_that_loses_a_prompt_is_not_believed(tmp_path: Path, prompts: Path) -> None:
    class Forgetful(FakeEngine):
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            for completions in super().stream(requests):
                yield [each for each in completions if each.request.index != 5]

    with pytest.raises(RuntimeError, match="the engine ended with"):
        go(prompts, tmp_path / "out", build=Forgetful)
    assert manifest_of(tmp_path / "out")["status"] == "running"


@thorough
def test_memory_does_not_grow_with_the_number_of_prompts(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from helpers import fakes as t;"
        "s = t.go(sys.argv[1], t.Path(sys.argv[1] + '.out'), params=t.SamplingParams(max_tokens=1), batch_size=8);"
        "print(s.written.prompts, s.peak_memory)"
    )
    peaks = {}
    for count in (6_000, 24_000):  # the store's page cache is full by the first
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"prompt": "prompt number {n}"}}\n' for n in range(count)))
        done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
        prompts, peaks[count] = map(int, done.stdout.split())
        assert prompts == count
    assert peaks[24_000] - peaks[6_000] < 3 << 20  # 170 bytes per prompt
