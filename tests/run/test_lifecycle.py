"""A run from its start to its end: what it writes, and that only the prompts decide it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.fakes import NAMES, Watcher, content, go, lines, manifest_of, stopping_at
from helpers.records import log_entries


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
        "8": "prompts.jsonl:8: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "nine": "prompts.jsonl:10: 7 tokens, the model has room for 4",
    }
    by_index = {line["index"]: line for line in written}
    assert by_index[9]["metadata"] == {"task": "t"}
    assert by_index[12]["metadata"] == {"metadata": "\ud800"}
    assert by_index[11]["logprobs"][0]["logprob"] == -0.1
    written = summary.written
    assert (summary.status, written.prompts, written.samples, written.errors) == ("finished", 16, 15, 3)
    assert summary.sha256 == hashlib.sha256((out / "outputs.jsonl").read_bytes()).hexdigest()
    assert written.tokens == summary.fresh.tokens == 45
    assert summary.target_passes > 0
    assert summary.peak_memory > 10 << 20
    assert watcher.messages == []
    last = watcher.reports[-1]
    assert (last.done, last.total, last.unit, last.left) == (16, 16, "prompts", None)
    assert last.figures[-1] == "3 errors"


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
        "prompt_column": None,
    }
    assert manifest["parameters"]["max_tokens"] == 3
    assert manifest["parameters"]["limit"] == 12
    assert manifest["settings"]["batch_size"] == 4
    assert "batch_size" not in manifest["parameters"]
    assert manifest["profile"]["target"]["digest"] == "t"
    assert "probe" not in manifest
    assert manifest["summary"]["prompts"] == summary.written.prompts == 12
    for name in NAMES[:2]:
        data = (out / name).read_bytes()
        assert manifest["files"][name] == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_the_counts_of_the_manifest_are_those_of_the_acceptance_log(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(4))
    assert manifest_of(out)["status"] == "interrupted"
    go(prompts, out)
    log = log_entries(out / "acceptance.jsonl")
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


def test_importing_needs_no_engine() -> None:
    code = "import sys, detgen.run; sys.exit(bool({'torch', 'datasets', 'detgen.engine.engine'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
