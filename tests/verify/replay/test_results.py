"""Results of a run beside its outputs: audited, too, as what the outputs give."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import Silent
from helpers.tampering import edit_lines, edit_manifest

from detgen import Engine, EngineConfig, SamplingParams
from detgen.run import RunConfig, run
from detgen.verify.replay.result import AuditResult

BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Sort a list."}], "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3},
    {"messages": [{"role": "user", "content": "Sort a list."}], "stream": True},
    {"messages": [{"role": "robot", "content": "Sort a list."}]},
]


@pytest.fixture
def folder(tmp_path: Path, engine: Engine) -> Path:
    """The output folder of a run of a batch file."""
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(BODIES)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    params = SamplingParams(max_tokens=6, temperature=1.0)
    config = RunConfig(str(tmp_path / "batch.jsonl"), tmp_path / "out", params, EngineConfig(), output_format="openai")
    run(config, Silent(), build_engine=lambda _: engine)
    return tmp_path / "out"


def renew(folder: Path) -> None:
    data = (folder / "results.jsonl").read_bytes()
    known = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({"results.jsonl": known}))


def test_untouched(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    assert audit(folder).findings == []


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines.pop(),
        lambda lines: lines.reverse(),
        lambda lines: lines[0].update(custom_id="other"),
        lambda lines: lines[0]["response"]["body"]["usage"].update(prompt_tokens=1),
        lambda lines: lines[0]["response"]["body"]["choices"][1]["message"].update(content="other"),
        lambda lines: lines[1]["response"].update(status_code=200),
    ],
)
def test_whoever_changes_them_is_found(
    folder: Path, audit: Callable[[Path], AuditResult], change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    edit_lines(folder / "results.jsonl", change)
    found = [(finding.where, finding.what[:14]) for finding in audit(folder).findings]
    assert ("results.jsonl", "its SHA-256 is") in found
    renew(folder)
    (finding,) = audit(folder).findings
    assert (finding.where, finding.what) == ("results.jsonl", "is not what outputs.jsonl gives")


def test_results_that_are_gone_are_missed(folder: Path, audit: Callable[[Path], AuditResult]) -> None:
    (folder / "results.jsonl").unlink()
    (finding,) = audit(folder).findings
    assert (finding.where, finding.what) == ("results.jsonl", "is missing")
