"""The three forms of the acceptance log: the same lines, whatever form a run had before, and wherever it was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from helpers.checks import Silent
from helpers.fakes import FakeEngine, config, go, manifest_of, stopping_at

from detgen.outputs import log_file
from detgen.outputs.log_file import contents
from detgen.run import run

FORMS = ("jsonl", "zst", "off")
LOGS = {"jsonl": "acceptance.jsonl", "zst": "acceptance.jsonl.zst"}


@pytest.fixture
def wanted(tmp_path: Path, prompts: Path) -> bytes:
    go(prompts, tmp_path / "plain")
    return (tmp_path / "plain" / "acceptance.jsonl").read_bytes()


def log_of(out: Path, form: str) -> bytes:
    """The lines of a log; there is no other."""
    assert {path.name for path in out.glob("acceptance*")} == {LOGS[form]}
    with (out / LOGS[form]).open("rb") as file:
        return b"".join(contents(file, LOGS[form]))


def check(out: Path, form: str, wanted: bytes) -> None:
    manifest = manifest_of(out)
    assert manifest["acceptance_log"] == form
    assert sorted(manifest["files"]) == sorted(["outputs.jsonl", *([LOGS[form]] if form in LOGS else [])])
    if form == "off":
        assert not list(out.glob("acceptance*"))
    else:
        assert log_of(out, form) == wanted


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_same_lines(tmp_path: Path, prompts: Path, wanted: bytes, form: str) -> None:
    out = tmp_path / "out"
    go(prompts, out, acceptance_log=form)
    check(out, form, wanted)
    assert (out / "outputs.jsonl").read_bytes() == (tmp_path / "plain" / "outputs.jsonl").read_bytes()
    if form == "zst":  # any other program reads it as well
        with (out / LOGS[form]).open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            assert reader.read() == wanted


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_run_goes_on_in_another_form(
    tmp_path: Path, prompts: Path, wanted: bytes, first: str, second: str, whole: bool
) -> None:
    """Its samples are found, and the log of the former form is gone."""
    out = tmp_path / "out"
    go(prompts, out, build=FakeEngine if whole else stopping_at(4), acceptance_log=first)
    assert manifest_of(out)["status"] == ("finished" if whole else "interrupted")
    done = go(prompts, out, acceptance_log=second)
    check(out, second, wanted)
    assert done.resumed > 0
    if whole:
        assert (done.status == "already finished") == (first == second)
        assert first == second or not done.fresh.tokens


def test_the_frames_do_not_depend_on_when_lines_were_ready(
    tmp_path: Path, prompts: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "_BLOCK", 2000)
    for name, batch in (("a", 1), ("b", 7)):
        go(prompts, tmp_path / name, batch_size=batch, acceptance_log="zst")
    first, second = ((tmp_path / name / LOGS["zst"]).read_bytes() for name in "ab")
    assert first == second
    assert first.count(zstandard.FRAME_HEADER) > 1
    assert log_of(tmp_path / "a", "zst") == wanted


def test_a_log_that_was_torn_is_written_again(
    tmp_path: Path, prompts: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "_BLOCK", 2000)
    out = tmp_path / "out"
    go(prompts, out, build=stopping_at(5), acceptance_log="zst")
    path = out / LOGS["zst"]
    data = path.read_bytes()
    for size in (len(data) - 5, len(data) // 2, 0):
        path.write_bytes(data[:size])
        again = tmp_path / f"again{size}"
        again.mkdir()
        for file in out.iterdir():
            (again / file.name).write_bytes(file.read_bytes())
        go(prompts, again, acceptance_log="zst")
        check(again, "zst", wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_starts_over(tmp_path: Path, prompts: Path, wanted: bytes, form: str) -> None:
    out = tmp_path / "out"
    for former in FORMS:
        go(prompts, out, acceptance_log=former)
        asked = config(prompts, out, acceptance_log=form, overwrite=True)
        run(asked, Silent(), build_engine=FakeEngine)
        check(out, form, wanted)
