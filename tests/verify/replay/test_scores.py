"""Audits of scores: an untouched folder passes, whatever its batches were, and each tampering is found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import edit_lines, edit_manifest

from detgen import Engine, EngineConfig
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.errors import CheckError
from detgen.outputs.identity import digest
from detgen.outputs.samples import pack, unpacked
from detgen.outputs.store import STORE
from detgen.run import ScoreConfig, run
from detgen.verify.replay.audit import Audit
from detgen.verify.replay.claims import read_manifest
from detgen.verify.replay.result import AuditResult

LINES: list[dict[str, Any]] = [
    {"id": "one", "prompt": "def add(a, b):\n", "completion": "    return a + b\n", "note": 1},
    {"id": "several", "prompt": "import", "completions": [" os", " sys", " re"]},
    {"id": "text", "text": "class Node:\n    def __init__(self):\n" * 50},
    {"id": "wrong", "prompt": "x", "completion": 3},
    {"id": "long", "prompt": "x = 1\n" * 700, "completion": "y"},
    {"id": "ids", "prompt_token_ids": [5, 4095, 7], "completion": " = 3"},
    {"id": "last", "text": "return 1\n"},
]


def write(folder: Path, engine: Any, **changes: Any) -> Path:
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    config = ScoreConfig(str(folder / "p.jsonl"), folder / "out", EngineConfig(drafter="none"), **changes)
    run(config, Silent(), build_engine=lambda _: engine)
    return folder / "out"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:
    return write(tmp_path_factory.mktemp("scores"), engine.with_settings(drafter="none", batch_size=3))


@pytest.fixture
def folder(scored: Path, tmp_path: Path) -> Path:
    shutil.copytree(scored, tmp_path / "out")
    return tmp_path / "out"


def renew(folder: Path) -> None:
    data = (folder / "outputs.jsonl").read_bytes()
    found = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda manifest: manifest.update(files={"outputs.jsonl": found}))


def test_untouched(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    result = audit(folder)
    assert result.findings == []
    assert (result.samples, result.missing, result.other_profile) == (7, 0, [])
    assert result.tokens == sum(
        json.loads(line).get("completion_tokens", 0) for line in (folder / "outputs.jsonl").open()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[0].update(logprob=lines[0]["logprob"] + 1e-9), "outputs.jsonl:1: logprob is"),
        (lambda lines: lines[1]["logprobs"][0].update(logprob=-1.0), "outputs.jsonl:2: logprobs[0] is"),
        (lambda lines: lines[4]["logprobs"][3].update(greedy="x"), "outputs.jsonl:5: logprobs[3] is"),
        (lambda lines: lines[2].update(is_greedy=True), "outputs.jsonl:3: is_greedy is True"),
        (lambda lines: lines[0]["token_ids"].append(3), "outputs.jsonl:1: token_ids has"),
        (lambda lines: lines[0].update(metadata={"note": 2}), "outputs.jsonl:1: metadata is"),
        (lambda lines: lines[0].update(extra=1), "outputs.jsonl:1: has 'extra', which no run writes here"),
        (lambda lines: lines[5].update(error="p.jsonl:4: something else"), "outputs.jsonl:6: error is"),
        (lambda lines: lines[0].update(error="p.jsonl:1: no"), "outputs.jsonl:1: has 'error'"),
        (lambda lines: lines.pop(1), "is prompt 1, sample 1, but prompt 1, sample 0 comes here"),
        (lambda lines: lines.pop(), "outputs.jsonl: ends before prompt 6, sample 0"),
        (lambda lines: lines.append(lines[-1]), "comes after the last prompt's output"),
        (lambda lines: lines.insert(2, lines.pop(3)), "is prompt 1, sample 2, but prompt 1, sample 1 comes here"),
    ],
)
def test_tampering(
    folder: Path, audit: Callable[[Path], AuditResult], change: Callable[[list[dict[str, Any]]], Any], said: str
) -> None:
    """Also where the digests were made to fit."""
    edit_lines(folder / "outputs.jsonl", change)
    renew(folder)
    result = audit(folder)
    assert result.faults
    assert any(said in f"{finding.where}: {finding.what}" for finding in result.findings), result.findings


def test_digests_and_totals(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    edit_manifest(folder, lambda manifest: manifest["summary"].update(tokens=1))
    (finding,) = audit(folder).findings
    assert "summary.tokens is 1, the lines give" in finding.what
    with (folder / "outputs.jsonl").open("a") as file:
        file.write("\n")
    assert any("SHA-256" in finding.what for finding in audit(folder).findings)


def test_a_stopped_run(tmp_path: Path, engine: Engine, audit: Callable[[Path], AuditResult]) -> None:
    """What the store has is judged, too; what is missing is counted."""

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def score_stream(self, requests: Any) -> Any:
            done = 0
            for scores in engine.with_settings(batch_size=1).score_stream(requests):
                yield scores
                done += len(scores)
                if done >= 3:
                    raise MemoryError

    with pytest.raises(MemoryError):
        write(tmp_path, Failing())
    result = audit(tmp_path / "out")
    assert result.findings == []
    assert result.samples >= 2
    assert result.missing > 0
    assert result.samples + result.missing == 9
    with sqlite3.connect(tmp_path / "out" / STORE) as db:
        query = "SELECT id, place, key, value FROM entries JOIN packed USING (id) ORDER BY id DESC"
        entry, place, key, value = db.execute(query).fetchone()
        asked = ScoreRequest(0, 0, prompt="")
        score = unpacked(value[16:], asked, 0)
        assert isinstance(score, Score)
        data = pack(replace(score, logprobs=(-1.0, *score.logprobs[1:])))
        db.execute("UPDATE packed SET value = ? WHERE id = ?", (digest(key, data) + data, entry))
    (finding,) = audit(tmp_path / "out").findings
    assert finding.where == STORE
    assert f"of prompt {place}, sample" in finding.what


def test_another_profile(folder: Path, audit: Callable[[Path], AuditResult], engine: Engine) -> None:
    """Differences that rounding explains are ties; larger ones, and wrong sums, are faults."""
    edit_manifest(folder, lambda manifest: manifest["profile"].update(device="another"))

    def nudge(by: float) -> Callable[[list[dict[str, Any]]], None]:
        def change(lines: list[dict[str, Any]]) -> None:
            entry = lines[1]["logprobs"][0]
            entry["logprob"] += by
            lines[1]["logprob"] = entry["logprob"]

        return change

    assert audit(folder).findings == []
    edit_lines(folder / "outputs.jsonl", nudge(1e-4))
    renew(folder)
    result = audit(folder)
    assert (result.faults, result.ties) == (0, 1), result.findings
    edit_lines(folder / "outputs.jsonl", nudge(0.5))
    renew(folder)
    assert audit(folder).faults
    edit_lines(folder / "outputs.jsonl", nudge(-0.5))
    edit_lines(folder / "outputs.jsonl", lambda lines: lines[1].update(logprob=-3.0))
    renew(folder)
    assert audit(folder).faults


def test_room(tmp_path: Path, engine: Engine) -> None:
    """A run with less memory refused more; an audit with less than the run cannot judge."""
    small = engine.with_settings(drafter="none", kv_memory=4 * 64 * engine.position_bytes)
    out = write(tmp_path, small)
    assert "the KV cache holds sequences of 256" in (out / "outputs.jsonl").read_text()
    assert Audit(out, read_manifest(out), engine, None).run(Silent()).findings == []
    other = tmp_path / "other"
    shutil.copytree(out, other)
    edit_lines(
        other / "outputs.jsonl", lambda lines: lines[4].update(error=lines[4]["error"].replace("tokens", "words"))
    )
    renew(other)
    assert Audit(other, read_manifest(other), engine, None).run(Silent()).faults
    whole = write(tmp_path, engine, overwrite=True)
    with pytest.raises(CheckError, match="prompt 2 needs more positions than this engine's KV cache holds"):
        Audit(whole, read_manifest(whole), small, None).run(Silent())


def test_what_is_not_finite(tmp_path: Path, engine: Engine, audit: Callable[[Path], AuditResult]) -> None:
    """An error of a score's own is derived again, as scores are."""
    with engine.canonical.decoder.breaking(4095):
        out = write(tmp_path, engine.with_settings(prefix_cache=False))
        engine.reset_prefix_cache()
        assert "not finite" in (out / "outputs.jsonl").read_text()
        assert audit(out).findings == []
    engine.reset_prefix_cache()
    assert any("has 'error'" in finding.what for finding in audit(out).findings)
