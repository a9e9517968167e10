"""Everything of a run besides the choice of tokens: derived again, and found where it is another.

Digests are renewed after each change, so that only the content can tell.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import Changed, edit_lines, edit_manifest, fail, renew

from detgen import Engine, EngineConfig, Request, SamplingParams
from detgen.engine.request import Completion
from detgen.errors import CheckError
from detgen.outputs.identity import digest
from detgen.outputs.lines import dump
from detgen.outputs.samples import pack, unpacked
from detgen.outputs.store import STORE
from detgen.run import RunConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest
from detgen.verify.replay.result import AuditResult
from detgen.verify.replay.texts import TextReplay

Line = dict[str, Any]
Judge = Callable[[Path], AuditResult]


def found(result: AuditResult, where: str, words: str) -> bool:
    return any(f.where.startswith(where) and words in f.what for f in result.findings)


def first(lines: list[Line], **fields: Any) -> Line:
    return next(line for line in lines if all(line[name] == value for name, value in fields.items()))


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (0, lambda raw: raw.replace(b'"index":0', b'"index": 0'), "spelled as a run spells it, from byte"),
        (0, lambda raw: raw.replace(b'{"id":"greedy","index":0', b'{"index":0,"id":"greedy"'), "spelled as a run"),
        (0, lambda raw: raw.replace(b"greedy", b"gr\\u0065edy"), "spelled as a run"),
        (0, lambda raw: raw[:-2] + b',"extra":1}\n', "has 'extra', which no run writes here"),
        (0, lambda raw: raw[:-2] + b',"seed":0}\n', "spelled as a run"),
        (0, lambda raw: raw[:-1] + b" \n", "spelled as a run"),
        (0, lambda raw: raw + b"\n", "is not a line of a run"),
        (9, lambda raw: raw[:-1], "spelled as a run"),
        (7, lambda raw: raw[:-2] + b',"extra":1}\n', "has 'extra', which no run writes here"),
        (
            7,
            lambda raw: raw.replace(b"prompts.jsonl:6", b"prompts.jsonl:7"),
            "error is 'prompts.jsonl:7: prompt must be",
        ),
        (0, lambda raw: b'{"index":0,"sample":' + b"[" * 50_000 + b"\n", "is not a line of a run"),
    ],
    ids=[
        *("space", "order", "escape", "key", "twice", "trailing", "empty line", "no end", "error's key"),
        *("error's place", "deep"),
    ],
)
def test_the_bytes_of_output_lines(
    folder: Path, audit: Judge, line: int, change: Callable[[bytes], bytes], words: str
) -> None:
    path = folder / "outputs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    changed = change(lines[line])
    assert changed != lines[line]
    path.write_bytes(b"".join([*lines[:line], changed, *lines[line + 1 :]]))
    renew(folder)
    assert found(audit(folder), "outputs.jsonl", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ls: ls[1].update(logprob=ls[1]["logprob"] - 1e-7), "logprob is -"),
        (lambda ls: ls[1].update(margin=ls[1]["margin"] + 1e-7), "margin is 0."),
        (lambda ls: ls[1].update(margin=None), "margin is None, should be 0."),
        (lambda ls: ls[1].update(logprob=0.5), "logprob is 0.5, should be -"),
        (lambda ls: ls[0].update(token=ls[0]["token"] + 1), "token is"),
        (lambda ls: ls[1].update(position=9), "position is 9, should be 1"),
        (lambda ls: ls[1].update(id="other"), "has 'id', which no run writes here"),
        (lambda ls: ls[1].update(extra=1), "has 'extra', which no run writes here"),
        (lambda ls: ls[0].update(drafter="model"), "the first token is never drafted"),
        (lambda ls: ls[0].update(drafted=ls[0]["token"]), "1 tokens are drafted, where 0 can be"),
        (lambda ls: first(ls, status="accepted").update(status="corrected"), "status is 'corrected', should be 'acce"),
        (lambda ls: first(ls, status="corrected").update(status="accepted"), "status is 'accepted', should be 'corre"),
        (lambda ls: first(ls, status="accepted").update(drafted=5), ""),
        (lambda ls: first(ls, status="corrected").update(drafted=10**6), "drafted token is not in the vocabulary"),
        (lambda ls: first(ls, status="bonus").update(drafted=5), ""),
        (lambda ls: first(ls, status="rolled_back").update(token=5), "token is 5, should be None"),
        (lambda ls: first(ls, status="rolled_back").update(logprob=-1.0), "logprob is -1.0, should be None"),
        (lambda ls: first(ls, drafter="model").update(drafter="sorcery"), "drafter is 'sorcery', but must be one of"),
        (lambda ls: first(ls, drafter="model").update(drafter=["model"]), "drafter is ['model'], but must be one of"),
        (lambda ls: ls[4].update(round=7), ""),
        (lambda ls: ls[-1].update(round=float(ls[-1]["round"])), "spelled"),
        (lambda ls: ls.pop(1), ""),
        (lambda ls: ls.remove(first(ls, status="bonus")), ""),
        (lambda ls: ls.insert(1, ls[1]), ""),
        (lambda ls: ls.append({**ls[-1], "round": 99}), "comes after the last token"),
        (lambda ls: ls.append(ls[-1]), "one too many"),
        (lambda ls: ls.append({**ls[-1], "index": 99}), "after the last prompt's output"),
        (lambda ls: ls.insert(1, {**ls[1], "index": -1}), "is prompt -1, sample 0, but prompt 0, sample 0 comes here"),
        (lambda ls: ls.__setitem__(slice(0, 2), ls[1::-1]), ""),
        (lambda ls: first(ls, status="unverified").update(drafter="ngram"), "drafter is 'ngram', should be 'none'"),
        (lambda ls: first(ls, status="unverified").update(round=3), ""),
        (lambda ls: first(ls, status="unverified").update(status="plain"), "status is 'plain', should be 'unverified'"),
        (lambda ls: ls.append({**ls[-1], "index": 5}), "is prompt 5, sample 0"),
    ],
)
def test_the_acceptance_log(folder: Path, audit: Judge, change: Callable[[list[Line]], Any], words: str) -> None:
    path = folder / "acceptance.jsonl"
    edit_lines(path, change)
    renew(folder)
    result = audit(folder)
    assert found(result, "acceptance.jsonl", words), result.findings
    assert result.differing == 0


def test_a_draft_that_was_wrong_is_anybodys(folder: Path, audit: Judge) -> None:
    """What a drafter proposed in vain is nowhere else, and no output depends on it."""
    edit_lines(folder / "acceptance.jsonl", lambda ls: first(ls, status="rolled_back").update(drafted=7))
    renew(folder)
    assert audit(folder).findings == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["summary"].update(tokens=m["summary"]["tokens"] + 1), "summary.tokens is"),
        (lambda m: m["summary"].update(errors=0), "summary.errors is 0, the lines give 2"),
        (lambda m: m["summary"]["drafters"]["model"].update(bonus=0), "summary.drafters.model is"),
        (lambda m: m["summary"]["drafters"].pop("none"), "summary.drafters.none is None"),
        (lambda m: m["summary"]["total"].update(plain=0), "summary.total is"),
        (lambda m: m["files"]["outputs.jsonl"].update(bytes=7), "bytes, the manifest says 7"),
        (lambda m: m["input"].update(format="json"), "input.format is 'json', the prompts give 'jsonl'"),
        (lambda m: m["input"].update(prompts=None), "input.prompts is None, the prompts give 8"),
    ],
)
def test_what_the_manifest_says(folder: Path, audit: Judge, change: Callable[[Line], Any], words: str) -> None:
    edit_manifest(folder, change)
    result = audit(folder)
    assert any(words in f.what for f in result.findings), result.findings


def test_a_damaged_manifest_is_one_line(folder: Path) -> None:
    edit_manifest(folder, lambda m: m.pop("files"))
    with pytest.raises(CheckError, match="files is missing, though the status is finished"):
        read_manifest(folder)
    edit_manifest(folder, lambda m: m.update(detgen="0.0.1"))
    with pytest.raises(CheckError, match=r"was written by detgen '0\.0\.1', this is"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line["token_ids"].__setitem__(0, 5), "text"),
        (lambda line: line.update(finish_reason="stop"), "finish_reason is 'stop', should be 'length'"),
        (lambda line: line.update(completion_tokens=3), "completion_tokens is 3"),
        (lambda line: line["token_ids"].append(5), "has 9 tokens, but may have 8"),
        (lambda line: line.update(error="no"), "is an error, but the prompt can run"),
    ],
)
def test_unverified_samples(folder: Path, audit: Judge, change: Callable[[Line], Any], words: str) -> None:
    """Their tokens are nobody's promise; what follows from them is judged."""
    edit_lines(folder / "outputs.jsonl", lambda lines: change(first(lines, id="unverified")))
    renew(folder)
    assert found(audit(folder), "outputs.jsonl:7", words)


def test_log_probabilities_of_unverified_samples(tmp_path: Path, engine: Engine) -> None:
    """They go together with each other and with the acceptance log."""
    prompts = [{"prompt": "import os\n", "deterministic": False, "logprobs": 3, "max_tokens": 4}]
    folder = make_run(tmp_path, prompts, engine)
    assert judge(folder, engine).findings == []

    def attempt(change: Callable[[list[Line]], Any]) -> AuditResult:
        before = (folder / "outputs.jsonl").read_bytes()
        edit_lines(folder / "outputs.jsonl", change)
        renew(folder)
        result = judge(folder, engine)
        (folder / "outputs.jsonl").write_bytes(before)
        return result

    impossible = "no logits give these log-probabilities"
    assert found(attempt(lambda ls: ls[0]["logprobs"][1]["top"].reverse()), "outputs.jsonl:1", impossible)
    assert found(attempt(lambda ls: ls[0]["logprobs"][1]["top"].pop()), "outputs.jsonl:1", impossible)
    assert found(attempt(lambda ls: ls[0]["logprobs"][1]["top"][0].__setitem__(0, -1)), "outputs.jsonl:1", impossible)
    assert found(attempt(lambda ls: ls[0]["logprobs"][1]["top"][0].__setitem__(1, 1.0)), "outputs.jsonl:1", impossible)

    def both(lines: list[Line]) -> None:
        own = lines[0]["logprobs"][1]
        own["logprob"] = own["top"][0][1] = own["logprob"] / 2

    assert found(attempt(both), "outputs.jsonl:1", "token 1: the logprob is not that of acceptance.jsonl")


def make_run(
    folder: Path, prompts: list[Line], engine: Any, params: SamplingParams | None = None, **config: Any
) -> Path:
    """The output folder of a run."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    asked = RunConfig(
        str(folder / "prompts.jsonl"), folder / "out", params or SamplingParams(max_tokens=8), EngineConfig(), **config
    )
    run(asked, Silent(), build_engine=lambda _: engine)
    return folder / "out"


def judge(folder: Path, engine: Any) -> AuditResult:
    return Audit(folder, read_manifest(folder), engine, None).run(Silent())


PROMPTS: list[Line] = [
    {"prompt": "def add(a, b):\n", "n": 2, "temperature": 0.8},
    {"prompt": 7},
    {"prompt": "import os\n"},
    {"prompt": "class Stack:\n"},
    {"prompt": "for i in range("},
    {"prompt": "while True:\n"},
]


@pytest.fixture
def stopped(tmp_path: Path, engine: Engine) -> Path:
    """The folder of a run that was interrupted."""
    small = engine.with_settings(drafter="ngram", batch_size=2)
    folder = make_run(tmp_path, PROMPTS, Changed(small, stop=4))
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"
    assert (folder / STORE).stat().st_size
    return folder


def kill(folder: Path) -> None:
    """Make an interrupted run one that was killed."""
    edit_manifest(folder, lambda m: (m.update(status="running"), m.pop("summary")))


def test_a_stopped_run(stopped: Path, engine: Engine) -> None:
    """What there is is judged, wherever a kill tore the files; the store has what they lack."""
    result = judge(stopped, engine)
    assert result.findings == []
    assert result.samples + result.missing == 6
    assert result.samples >= 3
    kill(stopped)
    samples = result.samples
    for name in ("outputs.jsonl", "acceptance.jsonl"):
        data = (stopped / name).read_bytes()
        for size in (len(data) - 30, len(data) // 2, 10, 0):
            (stopped / name).write_bytes(data[:size])
            result = judge(stopped, engine)
            assert result.findings == [], (name, size)
            assert result.samples == samples
    (stopped / "outputs.jsonl").unlink()
    (stopped / "acceptance.jsonl").unlink()
    result = judge(stopped, engine)
    assert result.findings == []
    assert result.samples == samples


def test_a_stopped_runs_store(stopped: Path, engine: Engine) -> None:
    """What it has is judged as well, and stays as it is."""
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    assert judge(stopped, engine).findings == []
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before

    def attempt(change: Callable[[Completion], Completion]) -> AuditResult:
        """Change the sample that was there first, whose lines are written, and renew its digest."""
        with sqlite3.connect(stopped / STORE) as db:
            rows = db.execute("SELECT id, key, value FROM entries JOIN packed USING (id) ORDER BY id")
            entry, key, value = rows.fetchone()
            asked = Request(0, 0, prompt="")
            found = unpacked(value[16:], asked, 0)
            assert isinstance(found, Completion)
            data = pack(change(found))
            db.execute("UPDATE packed SET value = ? WHERE id = ?", (digest(key, data) + data, entry))
        result = judge(stopped, engine)
        (stopped / STORE).write_bytes(before[STORE])
        return result

    for change in (
        lambda c: replace(c, text="other"),
        lambda c: replace(c, prompt_tokens=c.prompt_tokens + 1),
        lambda c: replace(c, records=c.records[:-1]),
        lambda c: replace(c, records=(c.records[0]._replace(margin=1.0), *c.records[1:])),
    ):
        assert found(attempt(change), STORE, "not what the other files have, or its tokens give")
    edit_lines(stopped / "outputs.jsonl", lambda lines: lines[0].update(text="other"))
    assert found(judge(stopped, engine), "outputs.jsonl:1", "text is 'other'")


def test_a_stopped_runs_summary(stopped: Path, engine: Engine) -> None:
    edit_manifest(stopped, lambda m: m["summary"].update(samples=1000))
    assert found(judge(stopped, engine), "manifest.json", "summary.samples is 1,000")


def test_a_sample_that_is_an_error_is_generated_again(tmp_path: Path, engine: Engine) -> None:
    """It must be the same error; a sample that has none is not believed to be one."""
    broken = Changed(engine, lambda c: fail(c) if c.request.id == "broken" else c)
    prompts = [{"prompt": "import os\n"}, {"id": "broken", "prompt": "return "}, {"prompt": "class A:\n"}]
    folder = make_run(tmp_path, prompts, broken)
    assert "at position 5" in (folder / "outputs.jsonl").read_text()
    result = judge(folder, broken)
    assert result.findings == []
    assert result.samples == 2
    assert found(judge(folder, engine), "outputs.jsonl:2", "is an error, but the prompt can run")
    edit_lines(folder / "outputs.jsonl", lambda lines: lines[1].update(error="prompts.jsonl:2: no"))
    renew(folder)
    assert found(judge(folder, broken), "outputs.jsonl:2", "error is 'prompts.jsonl:2: no', should be")


def test_refusals_for_want_of_memory(tmp_path: Path, engine: Engine) -> None:
    """They depend on the machine: the run's own room decides, and an engine with less memory asks for more."""

    def room(positions: int) -> Engine:
        return engine.with_settings(kv_memory=positions * engine.position_bytes)

    prompts = [{"prompt": "import os\n"}, {"prompt": "x = 1\n" * 20, "max_tokens": 100}]
    folder = make_run(tmp_path, prompts, room(64))
    assert "--kv-memory" in (folder / "outputs.jsonl").read_text()
    for judging in (engine, room(64), room(128)):
        assert judge(folder, judging).findings == []
    for old, new in (("sequences of 64", "sequences of 999"), ("may grow to 1", "may grow to 2"), ("ask for", "ask ")):
        before = (folder / "outputs.jsonl").read_text()
        assert old in before
        (folder / "outputs.jsonl").write_text(before.replace(old, new))
        renew(folder)
        assert found(judge(folder, engine), "outputs.jsonl:2", ""), new
        (folder / "outputs.jsonl").write_text(before)
    renew(folder)
    (tmp_path / "more").mkdir()
    for some, less in ((engine, room(64)), (room(128), room(64))):  # it ran, or was refused for want of more room
        whole = make_run(tmp_path / "more", prompts, some, overwrite=True)
        with pytest.raises(CheckError, match="give the audit more with --kv-memory"):
            judge(whole, less)


def test_logits_that_are_not_finite(folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of such logits cannot have been committed."""
    forward = type(engine.canonical)
    original = forward.run

    def broken(self: Any, *args: Any, **_: Any) -> Any:
        logits = original(self, *args)
        logits[-1] = float("nan")
        return logits

    monkeypatch.setattr(forward, "run", broken)
    assert any("not finite at position" in f.what for f in judge(folder, engine).findings)


def test_files_are_read_beside_each_other(folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's lines are held while it is judged, not longer."""
    held: list[int] = []
    original = TextReplay._sample

    def watched(self: TextReplay, seq: Any) -> Any:
        held.append(seq.request.index)
        return original(self, seq)

    monkeypatch.setattr(TextReplay, "_sample", watched)
    monkeypatch.setattr("detgen.verify.replay.texts.AHEAD", 2)
    seen: list[tuple[int, int]] = []

    class Watching(Silent):
        def progress(self, progress: Any) -> None:
            seen.append((progress.done, len(held)))

    assert Audit(folder, read_manifest(folder), engine, None).run(Watching()).findings == []
    assert all(taken <= done + 4 for done, taken in seen)


def test_numbers_are_compared_bit_for_bit(folder: Path, audit: Judge) -> None:
    """Zero has two signs, and dump spells both."""
    assert dump([0.0, -0.0]) == "[0.0,-0.0]"
    raw = (folder / "acceptance.jsonl").read_text()
    margins = [line for line in raw.splitlines() if '"margin":0.0}' in line]
    assert not margins
    edit_lines(folder / "acceptance.jsonl", lambda ls: ls[1].update(margin=-0.0))
    renew(folder)
    assert found(audit(folder), "acceptance.jsonl", "-0.0")


def test_hidden_states_that_are_not_finite(folder: Path, engine: Engine) -> None:
    """A text cannot stand where an error must, though the logits of its tokens may well be finite."""
    first = engine.encode(Request(0, 0, prompt="class Stack:\n"))[0]
    with engine.canonical.decoder.breaking(first):
        findings = judge(folder, engine).findings
    assert any("not finite at position 0" in f.what for f in findings)


def test_a_text_that_ends_before_its_last_token(tmp_path: Path, engine: Engine) -> None:
    """Whatever else fits: the tokens, the logits, and why it is said to have ended."""
    folder = make_run(tmp_path, [{"prompt": "def add(a, b):\n"}], engine)
    (line,) = map(json.loads, (folder / "outputs.jsonl").read_text().splitlines())
    tokens = line["token_ids"]
    at = next(i for i in range(1, 7) if tokens[i] not in tokens[:i] and tokens[i] != tokens[-1])
    edit_manifest(folder, lambda m: m["parameters"].update(stop_token_ids=[tokens[at]]))
    edit_lines(folder / "outputs.jsonl", lambda lines: lines[0].update(finish_reason="stop"))
    renew(folder)
    assert found(judge(folder, engine), "outputs.jsonl:1", f"has 8 tokens, but ends with token {at}")
