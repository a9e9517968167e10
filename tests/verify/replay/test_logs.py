"""Audits of runs whose acceptance log is compressed, or that have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checks import Silent
from helpers.tampering import Changed, edit_manifest, renew

from detgen import Engine, EngineConfig, SamplingParams
from detgen.outputs.log_file import contents, frame_of
from detgen.outputs.manifest import log_name
from detgen.outputs.manifest_reading import read_manifest
from detgen.report.page import render
from detgen.report.reporting import read_report
from detgen.run import RunConfig, run
from detgen.verify.replay.result import AuditResult

Judge = Callable[[Path], AuditResult]
ZST = "acceptance.jsonl.zst"


@pytest.fixture(params=["zst", "off"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(prompts: Path, out: Path, engine: Engine, form: str, stop: int | None = None) -> Path:
    drafting = engine.with_settings(drafter="ngram", draft_tokens=3, batch_size=2)
    asked = RunConfig(str(prompts), out, SamplingParams(), EngineConfig(), acceptance_log=form)  # type: ignore[arg-type]
    run(asked, Silent(), build_engine=lambda _: Changed(drafting, stop=stop))
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path, engine: Engine, form: str) -> Path:
    return write(finished / "prompts.jsonl", tmp_path / "out", engine, form)


def test_nothing_is_wrong_with_them(out: Path, audit: Judge, form: str) -> None:
    result = audit(out)
    assert result.findings == []
    assert result.logged == (form == "zst")
    edit_manifest(out, lambda m: m["summary"].update(tokens=m["summary"]["tokens"] + 1))
    assert [finding.what for finding in audit(out).findings] == [
        f"summary.tokens is {read_manifest(out)['summary']['tokens']}, the lines give"
        f" {read_manifest(out)['summary']['tokens'] - 1}"
    ]


def test_a_changed_output_is_found(out: Path, audit: Judge) -> None:
    path = out / "outputs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["token_ids"][3] += 1
    path.write_text("".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines))
    renew(out)
    assert audit(out).differing


@pytest.mark.parametrize("form", ["zst"], indirect=True)
def test_a_changed_line_of_a_compressed_log_is_found(out: Path, audit: Judge) -> None:
    with (out / ZST).open("rb") as file:
        plain = b"".join(contents(file, ZST))
    for old, new in ((b'"logprob":-0.1', b'"logprob":-0.2'), (b'"round":3,', b'"round":4,')):
        (out / ZST).write_bytes(frame_of(plain.replace(old, new, 1)))
        assert audit(out).findings[0].kind == "file"
        renew(out)
        assert any(finding.where.startswith(ZST) for finding in audit(out).findings)
        assert not read_report(out).faults.first or b"round" in old


@pytest.mark.parametrize("form", ["zst"], indirect=True)
def test_a_damaged_log_is_found(out: Path, audit: Judge) -> None:
    data = (out / ZST).read_bytes()
    for changed, what in ((data[:-3], "it ends in the middle"), (b"x" + data[1:], "it is damaged")):
        (out / ZST).write_bytes(changed)
        renew(out)
        assert any(f.where == ZST and what in f.what for f in audit(out).findings)
        report = read_report(out)
        assert any(what in fault for fault in report.faults.first)
        render(report)


def test_a_run_that_was_stopped(finished: Path, tmp_path: Path, engine: Engine, audit: Judge, form: str) -> None:
    """What its store has is judged, wherever a kill tore the log."""
    out = write(finished / "prompts.jsonl", tmp_path / "stopped", engine, form, stop=5)
    assert audit(out).findings == []
    edit_manifest(out, lambda m: (m.update(status="running"), m.pop("summary")))
    log = log_name(read_manifest(out))
    data = (out / log).read_bytes() if log else b""
    for size in (len(data), len(data) - 7, len(data) // 2, 0) if log else (0,):
        if log:
            (out / log).write_bytes(data[:size])
        result = audit(out)
        assert result.findings == []
        assert result.samples >= 3
        report = read_report(out)
        assert report.faults.first == []
        render(report)


def test_a_report(out: Path, form: str, finished: Path, tmp_path: Path) -> None:
    """One without a log says so, and shows what there is; runs of different forms are compared."""
    report = read_report(out, against=finished / "out")
    assert report.faults.first == []
    assert report.other is not None
    assert report.other[2].equal == report.other[2].samples
    page = render(report)
    assert ("This run has no acceptance log" in page) == (form == "off")
    assert bool(report.shown) == (form == "zst")
    other = tmp_path / "moved"
    shutil.copytree(finished / "out", other)
    assert read_report(other, against=out).faults.first == []
