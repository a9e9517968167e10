"""A run into the folder of one with other prompts: it takes what that one finished, and loses none of it on the way."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.examples import usual
from helpers.fakes import NAMES, FakeEngine, Watcher, content, go, lines, manifest_of, no_engine, stopping_at

from detgen.engine.config import EngineConfig
from detgen.errors import RunError
from detgen.outputs.store import STORE
from detgen.params import SamplingParams


def edited(prompts: Path, name: str = "edited") -> Path:
    """The same prompts, the first one at the end and edited, and a new one behind it."""
    first, *rest = prompts.read_text().splitlines()
    path = prompts.with_name(f"{name}.jsonl")
    path.write_text("\n".join([*rest, first.replace("prompt 0", f"prompt {name}"), '{"prompt": "new"}']))
    return path


def fresh(prompts: Path, **changes: Any) -> dict[str, bytes]:
    out = prompts.with_name(f"{prompts.stem}-fresh")
    go(prompts, out, overwrite=True, **changes)
    return content(out)


@pytest.mark.parametrize("interrupted", [False, True])
def test_other_prompts_take_what_is_there(tmp_path: Path, prompts: Path, interrupted: bool) -> None:
    out, watcher = tmp_path / "out", Watcher()
    kept = go(prompts, out, build=stopping_at(8) if interrupted else FakeEngine).fresh.samples
    created = manifest_of(out)["created"]
    path = edited(prompts)
    summary = go(path, out, watcher)
    (said,) = watcher.messages
    assert said.startswith(f"{out}: input: {prompts} (sha256 ")
    assert said.endswith(f"). {kept} finished samples can be reused; only what is new is generated")
    assert summary.resumed == kept - 1, "all but the prompt that was edited"
    assert summary.resumed + summary.fresh.samples == summary.written.samples == 16
    assert summary.reused == 0
    assert content(out) == fresh(path)
    assert sorted(file.name for file in out.iterdir()) == sorted(NAMES)
    manifest = manifest_of(out)
    assert manifest["input"]["path"] == str(path)
    assert manifest["created"] >= created
    assert go(path, out, build=no_engine).status == "already finished"
    assert go(prompts, out).fresh.samples == 0, "what no prompt asked for is still there"
    assert content(out) == fresh(prompts)


def test_a_limit_grows_and_shrinks(tmp_path: Path, prompts: Path) -> None:
    out, watcher = tmp_path / "out", Watcher()
    go(prompts, out, limit=5)
    summary = go(prompts, out, watcher, limit=12)
    assert watcher.messages[0].startswith(f"{out}: limit: 5 -> 12. 5 finished samples can be reused")
    assert (summary.resumed, summary.fresh.samples) == (5, 5)
    assert go(prompts, out, limit=3).fresh.samples == 0
    assert content(out) == fresh(prompts, limit=3)
    assert len(lines(out / "outputs.jsonl")) == 3
    assert go(prompts, out).resumed == 10, "what the smaller run left out stays"
    assert content(out) == fresh(prompts)


def test_changes_upon_changes_lose_nothing(tmp_path: Path, prompts: Path) -> None:
    """Each run is interrupted at its beginning; what the first one had finished is still there at the end."""
    out = tmp_path / "out"
    go(prompts, out)
    one, two = edited(prompts, "one"), edited(prompts, "two")
    assert go(one, out, build=stopping_at(1), batch_size=1).status == "interrupted"
    assert go(two, out, build=stopping_at(1), batch_size=1).status == "interrupted"
    assert go(two, out, build=stopping_at(1), batch_size=1, limit=9).status == "interrupted"
    assert go(prompts, out).fresh.samples == 0
    assert content(out) == fresh(prompts)


def test_an_interrupted_change_is_resumed(tmp_path: Path, prompts: Path) -> None:
    out, watcher = tmp_path / "out", Watcher()
    go(prompts, out, limit=4)
    path = edited(prompts)
    first = go(path, out, build=stopping_at(2), batch_size=2)
    assert first.status == "interrupted"
    summary = go(path, out, watcher)
    assert watcher.messages[0].startswith(f"resuming {out}: ")
    assert summary.resumed + summary.fresh.samples == 16
    assert content(out) == fresh(path)


@pytest.mark.parametrize("order", [(3, 4, 3), (4, 2, 4)])
def test_other_parameters_generate_what_is_new(tmp_path: Path, prompts: Path, order: tuple[int, ...]) -> None:
    """And find what they gave before."""
    out, watcher = tmp_path / "out", Watcher()
    for number, tokens in enumerate(order):
        params = SamplingParams(max_tokens=tokens)
        summary = go(prompts, out, watcher, params=params)
        assert summary.fresh.samples == (0 if number == 2 else 15)
        assert content(out) == fresh(prompts, params=params)
    assert [said.partition(". ")[0] for said in watcher.messages] == [
        f"{out}: max_tokens: {order[0]} -> {order[1]}", f"{out}: max_tokens: {order[1]} -> {order[2]}"
    ]  # fmt: skip


def test_what_lines_repeat_is_no_part_of_a_sample(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out)
    assert go(prompts, out, echo=True).fresh.samples == 0
    assert content(out) == fresh(prompts, echo=True)


def test_lines_that_are_alike_have_samples_of_their_own(tmp_path: Path) -> None:
    """Each generates its own, as without a store; a changed run takes as many as there are."""
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "a"}\n' * 12)
    generated: list[int] = []

    class Noting(FakeEngine):
        def stream(self, requests: Any) -> Any:
            for number, made in enumerate(super().stream(requests)):
                generated.extend(each.request.index for each in made)
                own = [each.records[0]._replace(round=number) for each in made]
                yield [replace(each, records=(r,)) for each, r in zip(made, own, strict=True)]

    go(path, out, build=Noting, batch_size=2)
    assert sorted(generated) == list(range(12))
    rounds = [line["round"] for line in lines(out / "acceptance.jsonl")]
    assert len(set(rounds)) > 3
    assert go(path, out, build=no_engine).status == "already finished"
    manifest = manifest_of(out) | {"status": "running"}
    del manifest["files"], manifest["summary"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    before = content(out)
    assert go(path, out).resumed == 12
    assert content(out) == before, "each line has its own sample again"
    path.write_text('{"prompt": "b"}\n' + '{"prompt": "a"}\n' * 13)
    assert go(path, out).fresh.samples == 1


def test_an_error_is_kept_in_its_place_and_tried_again_elsewhere(tmp_path: Path) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "overflow 1", "n": 3}\n{broken\n{"prompt": "too long"}\n')
    go(path, out)
    pulled: list[tuple[int, ...]] = []

    class Noting(FakeEngine):
        def stream(self, requests: Any) -> Any:
            return super().stream(pulled.append(tuple(r.wanted)) or r for r in requests)

    path.write_text('{"prompt": "overflow 1", "n": 3}\n{"prompt": "mended"}\n{"prompt": "too long"}\n')
    assert go(path, out, build=Noting).resumed == 3
    assert pulled == [(0,), (0,)]
    assert content(out) == fresh(path)
    pulled.clear()
    path.write_text('{"prompt": "new"}\n{"prompt": "overflow 1", "n": 3}\n')
    assert go(path, out, build=Noting).resumed == 2
    assert pulled == [(0,), (1,)]
    assert content(out) == fresh(path)


def test_an_unverified_sample_is_taken_in_its_place_only(tmp_path: Path) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "a", "deterministic": false}\n{"prompt": "b", "deterministic": false}\n')
    go(path, out)
    path.write_text(
        '{"prompt": "a", "deterministic": false}\n{"prompt": "new"}\n{"prompt": "b", "deterministic": false}'
    )
    summary = go(path, out)
    assert (summary.resumed, summary.fresh.samples) == (1, 2)
    assert content(out) == fresh(path)


@pytest.mark.parametrize("finished", [False, True])
def test_another_kind_of_run_is_refused(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """What another model gave would be lost from view."""
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if finished else stopping_at(4))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    state = "a finished" if finished else "an unfinished"
    said = rf"holds {state} run that differs from this one: profile\.device: cpu -> cuda\. Start over with --overwrite"
    with pytest.raises(RunError, match=said):
        go(edited(prompts), out, build=lambda config: FakeEngine(config, device="cuda"))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_that_was_tampered_with_is_refused(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out)
    with (out / "outputs.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"outputs\.jsonl was changed after the run had finished"):
        go(edited(prompts), out, build=no_engine)


def test_a_store_may_be_deleted(tmp_path: Path, prompts: Path) -> None:
    """A finished run is finished still; a changed one generates anew."""
    out = tmp_path / "out"
    go(prompts, out)
    (out / STORE).unlink()
    assert go(prompts, out, build=no_engine).status == "already finished"
    path = edited(prompts)
    assert go(path, out).fresh.samples == 16
    assert content(out) == fresh(path)


def test_results_of_the_earlier_run_go_or_are_made_anew(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, output_format="openai")
    path = edited(prompts)
    before = (out / "results.jsonl").read_bytes()
    assert go(path, out, output_format="openai").results is not None
    assert (out / "results.jsonl").read_bytes() != before
    go(prompts, out)
    assert not (out / "results.jsonl").exists()


def test_it_goes_together_with_a_cache(tmp_path: Path, prompts: Path) -> None:
    """What the folder gives goes to the cache, and what the cache has is not generated."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    go(prompts, out)
    path = edited(prompts)
    go(edited(prompts, "other"), tmp_path / "else", cache=cache)
    assert go(path, out, cache=cache).fresh.samples == 1, "the prompt that only this input has"
    assert go(prompts, tmp_path / "again", cache=cache).fresh.samples == 1, "the one that neither of the others has"
    assert content(out) == fresh(path)


_CHANGING = ("open", "write", "fsync", "replace", "unlink", "ftruncate")


def _died(action: Callable[[], object], fatal: int) -> bool:
    """Whether an action dies at its operation of that number on files, in a child process."""
    pid = os.fork()
    if not pid:
        count = 0

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def operation(*args: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                if count > fatal:
                    os._exit(9)
                return real(*args, **named)

            return operation

        for name in _CHANGING:
            setattr(os, name, wrap(getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("start", usual(["interrupted"], ["finished", "piped"]))
def test_a_change_that_is_killed_anywhere_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """Before each operation on a file; the same command goes on, or the earlier one does, and nothing runs again."""
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr("detgen.run.lifecycle.model_stamp", lambda config: None)
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("".join(f'{{"prompt": "prompt {n}"}}\n' for n in range(5)))
    new.write_text("".join(f'{{"prompt": "prompt {n}"}}\n' for n in (4, 9, 0, 1, 2, 3)))

    def act(path: Path, out: Path, build: Callable[[EngineConfig], FakeEngine] = FakeEngine) -> Any:
        data = path.read_bytes()
        sys.stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)  # type: ignore[assignment]
        return go("-" if start == "piped" else path, out, build=build)

    base = tmp_path / "base"
    if start == "interrupted":
        engines: list[FakeEngine] = []
        kept = act(old, base, lambda c: engines.append(stopping_at(3)(c)) or engines[0]).fresh.samples
        assert 0 < kept < 5
    else:
        kept = act(old, base).fresh.samples
    wanted = {path: fresh(path) for path in (old, new)}
    fatal = again = 0
    died = True
    while died:
        out = tmp_path / f"out{fatal}"
        shutil.copytree(base, out)
        died = _died(lambda out=out: act(new, out), fatal)  # type: ignore[misc]
        path = old if died and fatal % 2 else new
        summary = act(path, out)
        if summary.status == "finished":
            again += 1
            assert summary.fresh.samples <= (1 if path == new else 0) + 5 - kept, f"operation {fatal}"
        assert lines(out / "outputs.jsonl") == [
            json.loads(line) for line in wanted[path]["outputs.jsonl"].decode().splitlines()
        ], f"operation {fatal}"
        assert content(out) == wanted[path]
        left = {file.name for file in out.iterdir()} - {*NAMES, *(["stdin.jsonl"] if start == "piped" else [])}
        assert not left, f"operation {fatal}: {left}"
        shutil.rmtree(out)
        fatal += 1
    assert fatal > 25
    assert again > 20
