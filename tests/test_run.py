from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import detgen.outputs.writer
from detgen.engine.config import EngineConfig, EngineError
from detgen.engine.request import Completion, Request, SamplingParams, TokenLogprobs, TokenRecord
from detgen.engine.stats import EngineStats
from detgen.run import Progress, RunConfig, RunError, RunSummary, run

NAMES = ("outputs.jsonl", "acceptance.jsonl", "manifest.json")


class FakeEngine:
    """Tokens computed from the prompt, requests finished in an order of their own."""

    def __init__(self, config: EngineConfig, *, device: str = "cpu", pause: float = 0.0) -> None:
        self.stats = EngineStats()
        self.pulled = 0
        self.streams = 0
        self.on_step: Callable[[int], None] = lambda step: None
        self._config = config
        self._pause = pause
        self._device = device

    def profile(self) -> dict[str, Any]:
        return {"device": self._device, "dtype": "float32", "models": {"target": {"digest": "t"}}}

    def probe_report(self) -> dict[str, Any]:
        return {"row_invariant": self._device != "odd", "rows": (4, 8)}

    def draft_profile(self) -> dict[str, Any] | None:
        return {"digest": self._config.draft}

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        self.streams += 1
        source = iter(requests)
        order = random.Random(self._config.batch_size)
        live: list[Completion] = []
        ended = False
        while not ended or live:
            while not ended and len(live) < self._config.batch_size:
                request = next(source, None)
                if request is None:
                    ended = True
                    break
                self.pulled += 1
                live += complete(request)
            if live:
                self.stats.target_passes += 1
                self.on_step(self.stats.target_passes)
                if self._pause:
                    time.sleep(self._pause)
                order.shuffle(live)
                finished = [live.pop() for _ in range(order.randint(0, min(3, len(live))))]
                self.stats.tokens += sum(len(each.token_ids) for each in finished)
                yield finished


def complete(request: Request) -> list[Completion]:
    if request.prompt == "too long":
        return [Completion(request, error="7 tokens, the model has room for 4")]
    completions = []
    for sample in range(request.params.n):
        key = f"{request.prompt}{request.messages}{request.params}{sample}".encode()
        tokens = tuple(hashlib.sha256(key).digest()[: request.params.max_tokens])
        records = [
            TokenRecord(
                p, p // 2, token, "ngram", token if p % 2 else 0, "accepted" if p % 2 else "corrected", -0.1, 0.3
            )
            for p, token in enumerate(tokens)
        ]
        records.append(TokenRecord(len(tokens), 1, None, "ngram", 3, "rolled_back", None, None))
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = tuple(TokenLogprobs(-0.1, ((token, -0.1),)) for token in tokens)
        text = "".join(map(chr, tokens))
        completions.append(Completion(request, sample, text, tokens, "length", 4, logprobs, tuple(records)))
    return completions


class Watcher:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.reports: list[Progress] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, progress: Progress) -> None:
        self.reports.append(replace(progress, stats=replace(progress.stats)))


def config(prompts: Path | str, output: Path | None, *, batch_size: int = 4, **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {"params": SamplingParams(max_tokens=3), **changes}
    return RunConfig(str(prompts), output, engine=EngineConfig(batch_size=batch_size), **fields)


def go(
    prompts: Path | str, output: Path | None, watcher: Watcher | None = None, *, build: Any = FakeEngine, **changes: Any
) -> RunSummary:
    return run(config(prompts, output, **changes), watcher or Watcher(), build_engine=build)


def no_engine(config: EngineConfig) -> FakeEngine:
    raise AssertionError("no model should be loaded")


def stopping_at(step: int) -> Callable[[EngineConfig], FakeEngine]:
    """An engine that is interrupted in a step."""

    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None
        return engine

    return build


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES[:2]}


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Good lines of one and more samples, bad lines, and a line that the engine refuses."""
    texts = [json.dumps({"prompt": f"prompt {n}", "n": 1 + n % 5 // 4, "task": n}) for n in range(16)]
    texts[3] = '{"prompt": 3, "id": "three"}'
    texts[7] = "{broken"
    texts[9] = '{"prompt": "too long", "id": "nine", "task": "t"}'
    texts[11] = '{"messages": [{"role": "user", "content": "hi"}], "logprobs": 1}'
    texts[12] = '{"prompt": "x", "metadata": "\\ud800"}'
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(texts))
    return path


# --- a run ---


def test_a_run_writes_every_prompt_in_input_order(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    watcher = Watcher()
    summary = go(prompts, out, watcher)
    assert sorted(path.name for path in out.iterdir()) == sorted(NAMES)
    written = lines(out / "outputs.jsonl")
    assert [(line["index"], line["sample"]) for line in written] == [
        (n, sample) for n in range(16) for sample in range(2 if n in (4, 14) else 1)
    ]
    errors = {line["id"]: line["error"] for line in written if "error" in line}
    assert errors == {
        "three": "prompts.jsonl:4: prompt must be a string, got a number",
        8: "prompts.jsonl:8: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "nine": "prompts.jsonl:10: 7 tokens, the model has room for 4",
    }
    by_index = {line["index"]: line for line in written}
    assert by_index[9]["metadata"] == {"task": "t"}
    assert by_index[12]["metadata"] == {"metadata": "\ud800"}
    assert by_index[11]["logprobs"][0]["logprob"] == -0.1
    assert (summary.status, summary.prompts, summary.samples, summary.errors) == ("finished", 16, 15, 3)
    assert summary.sha256 == hashlib.sha256((out / "outputs.jsonl").read_bytes()).hexdigest()
    assert summary.tokens == 45
    assert summary.target_passes > 0
    assert summary.peak_memory > 10 << 20
    assert summary.deterministic
    assert watcher.messages == []
    last = watcher.reports[-1]
    assert (last.prompts_done, last.prompts_total, last.errors, last.tokens, last.resumed) == (16, 16, 3, 45, 0)


def test_the_manifest_says_what_was_run(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    summary = go(prompts, out, limit=12)
    manifest = manifest_of(out)
    assert manifest["status"] == "finished"
    assert manifest["input"] == {
        "path": str(prompts),
        "format": "jsonl",
        "sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        "prompts": 16,
    }
    assert manifest["parameters"]["max_tokens"] == 3
    assert manifest["parameters"]["limit"] == 12
    assert manifest["settings"]["batch_size"] == 4
    assert "batch_size" not in manifest["parameters"]
    assert manifest["profile"]["models"] == {"target": {"digest": "t"}}
    assert manifest["probe"] == {"row_invariant": True, "rows": [4, 8]}
    assert manifest["summary"]["prompts"] == summary.prompts == 12
    for name in NAMES[:2]:
        data = (out / name).read_bytes()
        assert manifest["files"][name] == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_a_run_without_the_guarantee_says_so(tmp_path: Path, prompts: Path) -> None:
    summary = go(prompts, tmp_path / "out", build=lambda config: FakeEngine(config, device="odd"))
    assert not summary.deterministic
    assert manifest_of(tmp_path / "out")["deterministic"] is False


def test_the_counts_of_the_manifest_are_those_of_the_acceptance_log(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    assert manifest_of(out)["status"] == "interrupted"
    go(prompts, out)
    log = lines(out / "acceptance.jsonl")
    counts = Counter(line["status"] for line in log)
    counts["drafted"] = sum(line["drafted"] is not None for line in log)
    counts["rounds"] = len({(line["index"], line["sample"], line["round"]) for line in log})
    summary = manifest_of(out)["summary"]
    assert {name: count for name, count in summary["total"].items() if count} == dict(counts)
    assert summary["drafters"] == {"ngram": summary["total"]}
    committed = [line["token"] for line in log if line["token"] is not None]
    assert committed == [token for line in lines(out / "outputs.jsonl") for token in line.get("token_ids", [])]
    assert summary["tokens"] == len(committed)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_order_of_finishing_changes_no_byte(tmp_path: Path, prompts: Path, batch_size: int) -> None:
    go(prompts, tmp_path / "a")
    go(prompts, tmp_path / "b", batch_size=batch_size)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_path_of_the_input_changes_no_byte(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(prompts, tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert go("./prompts.jsonl", None).output == Path("prompts-out")
    assert content(tmp_path / "a") == content(tmp_path / "prompts-out")


def test_both_files_grow_while_the_run_goes_on(tmp_path: Path, prompts: Path) -> None:
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


def test_an_engine_that_loses_a_prompt_is_not_believed(tmp_path: Path, prompts: Path) -> None:
    class Forgetful(FakeEngine):
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            for completions in super().stream(requests):
                yield [each for each in completions if each.request.index != 5]

    with pytest.raises(RuntimeError, match="the engine ended with"):
        go(prompts, tmp_path / "out", build=Forgetful)
    assert manifest_of(tmp_path / "out")["status"] == "running"


# --- interruption and resumption ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    assert 0 < first.prompts < 16
    assert first.target_passes == 6
    assert watcher.reports[-1].prompts_done < 16
    kept = len(lines(out / "journal.jsonl"))
    second = go(prompts, out, watcher)
    assert watcher.messages == [f"resuming {out}: {kept} finished samples kept"]
    assert second.status == "finished"
    assert 0 < second.resumed <= kept
    assert second.resumed + second.tokens // 3 == second.samples == 15
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


def test_a_journal_cut_at_any_byte_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terse(FakeEngine):  # a short journal, since there is a run for each of its bytes
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            for completions in super().stream(requests):
                yield [replace(each, records=each.records[: each.request.index // 2]) for each in completions]

    class Crashing(Terse):
        def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
            yield from super().stream(requests)
            raise MemoryError

    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr("detgen.run.session.model_stamp", lambda config: None)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "n": 2, "max_tokens": 1}\n{"prompt": 1}\n{"prompt": "b", "max_tokens": 1}\n')
    go(path, tmp_path / "whole", build=Terse)
    out = tmp_path / "out"
    with pytest.raises(MemoryError):
        go(path, out, build=Crashing)
    journal = (out / "journal.jsonl").read_bytes()
    manifest = (out / "manifest.json").read_bytes()
    assert journal.count(b"\n") == 3
    for size in range(len(journal) + 1):
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
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_run as t;"
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
    assert 0 < summary.resumed < summary.samples
    assert "finished samples kept" in watcher.messages[0]
    assert content(out) == content(tmp_path / "whole")


def test_settings_that_change_no_output_may_change_on_the_way(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    other = EngineConfig(
        batch_size=9, drafter="none", draft_tokens=2, verify_window=3, threads=1, kv_memory=1 << 20, draft="other"
    )
    summary = run(replace(config(prompts, out), engine=other), Watcher(), build_engine=FakeEngine)
    assert summary.resumed > 0
    assert manifest_of(out)["settings"]["drafter"] == "none"
    go(prompts, tmp_path / "whole")
    assert content(out)["outputs.jsonl"] == content(tmp_path / "whole")["outputs.jsonl"]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": SamplingParams(max_tokens=3, temperature=0.5)}, r"temperature: 0\.0 -> 0\.5"),
        ({"params": SamplingParams(max_tokens=3, stop=("x",), seed=2)}, r"seed: 0 -> 2; stop: \[\] -> \['x'\]"),
        ({"limit": 5}, "limit: None -> 5"),
    ],
)
def test_other_parameters_are_refused_without_a_model(
    tmp_path: Path, prompts: Path, changes: dict[str, Any], message: str, finished: bool
) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if finished else stopping_at(4))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    state = "a finished" if finished else "an unfinished"
    with pytest.raises(
        RunError, match=f"holds {state} run that differs from this one: {message}. Start afresh with --over"
    ):
        go(prompts, out, build=no_engine, **changes)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_other_prompts_are_refused(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    prompts.write_text('{"prompt": "other"}\n')
    with pytest.raises(
        RunError, match=r"input: .*prompts\.jsonl \(sha256 \w{12}\) -> .*prompts\.jsonl \(sha256 \w{12}\)"
    ):
        go(prompts, out, build=no_engine)


@pytest.mark.parametrize("finished", [False, True])
def test_another_profile_is_refused(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if finished else stopping_at(4))
    monkeypatch.setattr("detgen.run.session.model_stamp", lambda config: None)
    with pytest.raises(RunError, match=r"profile\.device: cpu -> cuda"):
        go(prompts, out, build=lambda config: FakeEngine(config, device="cuda"))


def test_a_finished_run_is_left_alone(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = go(prompts, out)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    monkeypatch.setattr("detgen.run.session.model_stamp", lambda config: None)  # no telling without a model
    assert go(prompts, out).status == "already finished"
    monkeypatch.undo()
    (out / "journal.jsonl").write_text("left by a crash at the very end")
    summary = go(prompts, out, build=FakeEngine)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    assert summary.status == "already finished"
    assert replace(first, status="already finished", resumed=15, seconds=0.0, target_passes=0) == replace(
        summary, peak_memory=first.peak_memory
    )


def test_a_finished_run_is_recognised_without_a_model(tmp_path: Path, prompts: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")
    asked = replace(config(prompts, tmp_path / "out"), engine=EngineConfig(target=target))
    run(asked, Watcher(), build_engine=FakeEngine)
    faster = replace(asked, engine=EngineConfig(target=target, batch_size=99))
    assert run(faster, Watcher(), build_engine=no_engine).status == "already finished"
    (target / "config.json").write_text('{"other": 1}')
    with pytest.raises(AssertionError, match="no model should be loaded"):
        run(asked, Watcher(), build_engine=no_engine)


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_finished_run_that_was_tampered_with_is_not_reported_as_done(
    tmp_path: Path, prompts: Path, name: str
) -> None:
    out = tmp_path / "out"
    go(prompts, out)
    with (out / name).open("a") as file:
        file.write("\n")
    with pytest.raises(
        RunError, match=rf"{name} was changed after the run had finished; start afresh with --overwrite"
    ):
        go(prompts, out, build=no_engine)
    (out / name).unlink()
    with pytest.raises(RunError, match=rf"{name} was deleted after the run had finished"):
        go(prompts, out, build=no_engine)
    assert go(prompts, out, overwrite=True).status == "finished"


def test_overwrite_starts_afresh_and_spares_the_rest(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    (out / "notes.txt").write_text("mine")
    summary = go(prompts, out, overwrite=True, params=SamplingParams(max_tokens=2))
    assert (summary.status, summary.resumed, summary.tokens) == ("finished", 0, 30)
    assert (out / "notes.txt").read_text() == "mine"


def test_an_engine_that_cannot_be_built_costs_the_former_run_nothing(tmp_path: Path, prompts: Path) -> None:
    def fail(config: EngineConfig) -> FakeEngine:
        raise EngineError("no such model")

    out = tmp_path / "out"
    with pytest.raises(EngineError):
        go(prompts, out, build=fail)
    assert not out.exists()
    go(prompts, out)
    before = content(out)
    with pytest.raises(EngineError):
        go(prompts, out, build=fail, overwrite=True)
    assert content(out) == before


# --- refusals ---


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_never_written_to(tmp_path: Path, prompts: Path, overwrite: bool) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "outputs.jsonl").write_text("years of work")
    with pytest.raises(RunError, match="holds files that are not of a detgen run"):
        go(prompts, out, build=no_engine, overwrite=overwrite)
    assert [path.read_text() for path in out.iterdir()] == ["years of work"]


def test_a_run_never_writes_into_its_input(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(RunError, match="is where the prompts are; choose another one with -o"):
        go(prompts, tmp_path, build=no_engine)
    with pytest.raises(RunError, match="is where the prompts are"):
        go(tmp_path, tmp_path / "out", build=no_engine)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.jsonl", None, r"there is no file .*missing\.jsonl"),
        ("empty.jsonl", "\n", r"no prompts in .*empty\.jsonl"),
        ("p.yaml", "a", r"p\.yaml: its name does not tell what it holds"),
        ("p.csv", "a,b\n1,2\n", "no column prompt or messages among a, b"),
    ],
)
def test_an_input_that_cannot_be_read_leaves_nothing_behind(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=message):
        go(tmp_path / name, tmp_path / "out", build=no_engine)
    assert not (tmp_path / "out").exists()


def test_a_limit_of_nothing_is_refused(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(RunError, match="limit must be at least 1, got 0"):
        go(prompts, tmp_path / "out", build=no_engine, limit=0)


def test_an_input_that_changes_on_the_way_is_refused(tmp_path: Path, prompts: Path) -> None:
    def build(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.on_step = lambda step: prompts.open("a").write("\n") and None if step == 2 else None
        return engine

    with pytest.raises(RunError, match=r"prompts\.jsonl changed while it was read"):
        go(prompts, tmp_path / "out", build=build)
    assert manifest_of(tmp_path / "out")["status"] == "running"


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
    with pytest.raises(RunError, match="No space left on device; free some space and run the same command again"):
        go(prompts, tmp_path / "out")
    monkeypatch.undo()
    assert go(prompts, tmp_path / "out").resumed > 0
    go(prompts, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# --- standard input ---


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        stream = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stream)

    return feed


def test_standard_input_is_kept_for_resuming(
    tmp_path: Path, prompts: Path, pipe: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prompts.read_bytes()
    pipe(data)
    monkeypatch.chdir(tmp_path)
    assert go("-", None, build=stopping_at(4)).output == Path("stdin-out")
    out = tmp_path / "stdin-out"
    assert (out / "stdin.jsonl").read_bytes() == data
    pipe(b'{"prompt": "other"}\n')
    with pytest.raises(RunError, match=r"input: - \(sha256"):
        go("-", None, build=no_engine)
    pipe(data)
    assert go("-", None, build=stopping_at(2)).resumed > 0
    pipe(b"")
    assert go("-", None).status == "finished"
    assert lines(out / "outputs.jsonl")[3]["error"] == "stdin:4: prompt must be a string, got a number"
    go(prompts, tmp_path / "whole")
    renamed = (tmp_path / "whole" / "outputs.jsonl").read_bytes().replace(b"prompts.jsonl:", b"stdin:")
    assert (out / "outputs.jsonl").read_bytes() == renamed
    pipe(data)
    assert go("-", None).status == "already finished"
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES, "stdin.jsonl"])


def test_standard_input_of_nothing(tmp_path: Path, pipe: Callable[[bytes], None]) -> None:
    pipe(b"")
    with pytest.raises(RunError, match="no prompts on standard input; pipe JSON lines into detgen, or name a file"):
        go("-", tmp_path / "out", build=no_engine)
    pipe(b"\n\n")
    with pytest.raises(RunError, match="no prompts in standard input"):
        go("-", tmp_path / "out", build=no_engine)
    assert not (tmp_path / "out").exists()


def test_a_terminal_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(RunError, match="no prompts on standard input"):
        go("-", tmp_path / "out", build=no_engine)


def test_overwrite_without_new_input_spares_the_old_run(
    tmp_path: Path, prompts: Path, pipe: Callable[[bytes], None]
) -> None:
    pipe(prompts.read_bytes())
    go("-", tmp_path / "out")
    before = content(tmp_path / "out")
    pipe(b"")
    with pytest.raises(RunError, match="no prompts on standard input"):
        go("-", tmp_path / "out", build=no_engine, overwrite=True)
    assert content(tmp_path / "out") == before
    pipe(b'{"prompt": "other"}\n')
    assert go("-", tmp_path / "out", overwrite=True).prompts == 1


# --- cost ---


def test_importing_needs_no_torch() -> None:
    code = "import sys, detgen.run; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_does_not_grow_with_the_number_of_prompts(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_run as t;"
        "s = t.go(sys.argv[1], t.Path(sys.argv[1] + '.out'), params=t.SamplingParams(max_tokens=1), batch_size=8);"
        "print(s.prompts, s.peak_memory)"
    )
    peaks = {}
    for count in (2_000, 200_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"prompt": "prompt number {n}"}}\n' for n in range(count)))
        done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
        prompts, peaks[count] = map(int, done.stdout.split())
        assert prompts == count
    assert peaks[200_000] - peaks[2_000] < 50 << 20
