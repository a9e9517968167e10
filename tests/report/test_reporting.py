"""Folders that are not as a run leaves them, that are large, or whose tokenizer is not there."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import examples
from helpers.fakes import go
from helpers.pages import read_page
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import OutputError
from detgen.report.log import read_log
from detgen.report.page import check_place, render, write
from detgen.report.reporting import Choosing, read_report
from detgen.report.streaming import Faults

Log = list[dict[str, Any]]


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    path.write_text(json.dumps(manifest))


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"has no manifest\.json; give the output folder"):
        read_report(tmp_path)


def test_another_version(out: Path) -> None:
    edit_manifest(out, detgen="0.0.1")
    with pytest.raises(OutputError, match="read it with the version that wrote it"):
        read_report(out)


@pytest.mark.parametrize("name", ["outputs.jsonl", "acceptance.jsonl"])
def test_a_missing_file(out: Path, name: str) -> None:
    (out / name).unlink()
    with pytest.raises(OutputError, match=rf"{name} is missing; restore the folder"):
        read_report(out)
    (out / name).symlink_to("/dev/null")
    with pytest.raises(OutputError, match="is a symbolic link, not a plain file"):
        read_report(out)


def test_an_id_that_is_not_there(out: Path) -> None:
    with pytest.raises(OutputError, match="has no request with the id 'nobody'; name one that it has"):
        read_report(out, ["greedy", "nobody"])


@pytest.mark.parametrize("name", ["outputs.jsonl", "acceptance.jsonl"])
def test_a_changed_file_is_marked(out: Path, name: str) -> None:
    """Even where it still reads well."""
    path = out / name
    old, new = (b'"greedy"', b'"greedx"') if name == "outputs.jsonl" else (b'"logprob":-0.1', b'"logprob":-0.2')
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    report = read_report(out)
    (what,) = report.faults.first
    assert what == f"{name}: its size or SHA-256 is not what the manifest says; it was changed after the run"
    page = read_page(render(report))
    assert what in page.one(id="faults").text
    assert "changed after its run wrote it" in page.one(id="faults").text


def test_totals_that_are_not_those_of_the_lines_are_marked(out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["summary"]["tokens"] += 1
    manifest["summary"]["drafters"]["ngram"]["accepted"] += 1
    edit_manifest(out, summary=manifest["summary"])
    first, second = read_report(out).faults.first
    assert first.startswith("manifest.json: tokens is ")
    assert second == "manifest.json: the counts of drafter ngram are not those of the log"


def test_tokens_that_are_not_those_of_the_log_are_marked(out: Path, rewrite: Any) -> None:
    def change(name: str, lines: Log) -> Log:
        if name == "outputs.jsonl":
            lines[0]["token_ids"][0] += 1
        return lines

    rewrite(out, change)
    assert read_report(out).faults.first == ["acceptance.jsonl: the tokens of prompt 0 are not the output's"]


def test_an_untouched_folder_is_not_marked(finished: Path) -> None:
    report = read_report(finished)
    assert not report.faults.count
    page = read_page(render(report))
    assert not list(page.all(id="faults"))
    assert not list(page.all(id="unfinished"))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Half a surrogate pair as an id, which JSON can spell, is fine; no control character reaches the page."""
    path = tmp_path / "p\x1b[31m.jsonl"
    lines = [
        r'{"id": "a\ud800", "prompt": "x"}',
        r'{"id": "\\ud800", "prompt": "y"}',
        '{"prompt": 1}',
        '{"prompt": "z"}',
    ]
    path.write_text("\n".join(lines))
    go(path, tmp_path / "out\x07")
    report = read_report(tmp_path / "out\x07")
    assert report.faults.first == []
    page = render(report)
    assert page.encode()
    assert not [c for c in page if ord(c) < 32 and c != "\n"]
    assert r"p\x1b[31m.jsonl" in page
    assert read_report(tmp_path / "out\x07", ["a\ud800"]).shown[0].line["text"]


@pytest.mark.parametrize(("status", "words"), [("interrupted", "was interrupted"), ("running", "is still going on")])
def test_a_run_that_has_not_finished_is_marked(out: Path, status: str, words: str) -> None:
    """Its last line may be torn; it is drawn as far as it goes, and no digest is missed."""
    gone: dict[str, Any] = {"summary": None} if status == "running" else {}
    edit_manifest(out, status=status, files=None, **gone)
    if status == "running":
        for name in ("outputs.jsonl", "acceptance.jsonl"):
            (out / name).write_bytes((out / name).read_bytes()[:-40])
    report = read_report(out)
    assert not report.faults.count
    page = read_page(render(report))
    assert f"This run {words}" in page.one(id="unfinished").text
    assert "8 finished samples" in page.one(id="unfinished").text
    assert "so far" in page.one(id="seconds").text


@pytest.mark.parametrize("name", ["outputs.jsonl", "acceptance.jsonl"])
def test_a_file_that_is_ahead_of_the_other(out: Path, name: str) -> None:
    """While a run goes on that is nothing to complain about."""
    edit_manifest(out, status="running", files=None, summary=None)
    lines = (out / name).read_bytes().splitlines(keepends=True)
    (out / name).write_bytes(b"".join(lines[: 1 if name == "outputs.jsonl" else 20]))
    report = read_report(out)
    assert not report.faults.count
    read_page(render(report))


def test_a_run_of_which_nothing_is_written_yet(out: Path) -> None:
    edit_manifest(out, status="running", files=None, summary=None, seconds=0.0)
    for name in ("outputs.jsonl", "acceptance.jsonl"):
        (out / name).write_bytes(b"")
    page = read_page(render(read_report(out)))
    assert "No request has a text yet." in page.text
    assert "The acceptance log is empty." in page.text
    assert "not recorded yet" in page.one(id="seconds").text


def test_without_the_tokenizer(out: Path) -> None:
    """Numbers stand for tokens, and a line says why."""
    edit_manifest(out, model="/nowhere/model")
    page = read_page(render(read_report(out)))
    assert "tokens are shown by their numbers" in page.one(id="no-texts").text
    assert all(row[3].startswith("#") for row in page.one(id="closest").rows())


def think(name: str, lines: Log) -> Log:
    """Thoughts on the sampled lines, and none on the others."""
    for line in lines:
        if name == "outputs.jsonl" and "token_ids" in line:
            line["thoughts"] = [[0, " <i>heads"], [line["prompt_tokens"] + 3, " tails"]] if line["seed"] == 4 else []
    return lines


def test_thoughts(out: Path, rewrite: Any) -> None:
    rewrite(out, think)
    report = read_report(out)
    assert not report.faults.count
    page = read_page(render(report))
    assert "It wrote 4 thoughts in 2 samples: 2 after chunks of prompts, 2 after others" in page.text
    assert page.one(id="thought-kinds").rows() == [["<i>heads", "2"], ["tails", "2"]]
    tables = [t.rows() for t in page.all("table") if t.attributes.get("id", "").startswith("thoughts-")]
    assert [(row[1], row[2]) for row in max(tables, key=len)] == [("prompt", "<i>heads"), ("completion", "tails")]
    assert not list(page.all("i"))


def test_chunks_of_a_thinking_model(out: Path, rewrite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its text, the state that it was read with, and the thought."""
    rewrite(out, think)
    report = read_report(out, ["sampled"])
    first = report.shown[0]
    assert first.prompt is not None
    prompt = len(first.prompt)
    assert (prompt + 3) % 4 == 0
    report.texts.chunk, report.texts.keeps = 4, True
    page = read_page(render(report))
    table, _ = (t for t in page.all("table") if t.attributes.get("id", "").startswith("chunks-"))
    rows = table.rows()
    texts = "".join(row[1] for row in rows).replace(" ", "")
    assert texts == (first.line["prompt"] + first.line["text"]).replace("\n", "↵").replace(" ", "")
    assert [row[0] for row in rows[:2]] == ["0–3", "4–7"]
    assert [row[2] for row in rows] == [
        "–",
        *["<i>heads"] * ((prompt + 3) // 4),
        *["tails"] * (len(rows) - (prompt + 7) // 4),
    ]
    assert {i: row[3] for i, row in enumerate(rows) if row[3] != "–"} == {0: "<i>heads", (prompt + 3) // 4: "tails"}


ODD = [None, True, -1, 3.5, "x", [], {}, [[1]], 10**30, "<b>"]


@given(data=st.data())
@examples(30)
def test_whatever_happens_to_a_line_is_marked(
    data: st.DataObject, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Values of other kinds and bytes that are not there any more end in a fault on the page, never in a traceback."""
    folder = tmp_path_factory.mktemp("odd") / "out"
    shutil.copytree(finished, folder)
    path = folder / data.draw(st.sampled_from(["outputs.jsonl", "acceptance.jsonl"]))
    lines = path.read_bytes().splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 1))
    if data.draw(st.booleans()):
        fields = json.loads(lines[at])
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(st.sampled_from(ODD))
        lines[at] = json.dumps(fields).encode() + b"\n"
    else:
        start = data.draw(st.integers(0, len(lines[at]) - 1))
        lines[at] = lines[at][:start] + data.draw(st.binary(max_size=4)) + lines[at][start + 5 :]
    changed = path.read_bytes() != b"".join(lines)
    path.write_bytes(b"".join(lines))
    against = finished if data.draw(st.booleans()) else None
    report = read_report(folder, against=against)
    assert bool(report.faults.count) == changed
    read_page(render(report))


def test_a_large_run_makes_a_small_page(out: Path, tmp_path: Path) -> None:
    """Ten thousand requests; the report reads them as a stream."""
    lines = {name: (out / name).read_text().splitlines() for name in ("outputs.jsonl", "acceptance.jsonl")}
    manifest = json.loads((out / "manifest.json").read_text())
    edit_manifest(out, status="interrupted", files=None, summary=None)
    manifest = json.loads((out / "manifest.json").read_text())
    zero = dict.fromkeys(("prompts", "samples", "errors", "tokens", "prompt_tokens"), 0)
    manifest["summary"] = {**zero, "drafters": {}, "total": {}}
    for name, all_ in lines.items():
        index = next(json.loads(line)["index"] for line in lines["outputs.jsonl"] if '"id":"stopped"' in line)
        own = [line for line in all_ if json.loads(line)["index"] == index]
        with (out / name).open("w") as file:
            for i in range(10_000):
                file.writelines(
                    line.replace('"id":"stopped"', f'"id":{i}').replace(f'"index":{index},', f'"index":{i},') + "\n"
                    for line in own
                )
    edit_manifest(out, status="running")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = read_report(out)
    size = write(report, tmp_path / "report.html")
    assert report.lines.samples == report.counts.samples == 10_000
    assert not report.faults.count
    assert size < 500_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    check_place(place)
    place.write_text("<!doctype html><p>mine")
    with pytest.raises(OutputError, match=r"page\.html was not written by detgen report; choose another file with -o"):
        check_place(place)
    place.unlink()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a symbolic link"):
        check_place(place)


def test_a_place_that_cannot_be_written(finished: Path) -> None:
    """The message names the page, not a file that is made on the way."""
    with pytest.raises(OutputError, match=r"cannot write /proc/page\.html: .*; choose another file with -o"):
        write(read_report(finished), Path("/proc/page.html"))


def chosen(folder: Path, thoughtful: tuple[int, int] | None = None) -> list[tuple[tuple[int, int], list[str]]]:
    choosing = Choosing([], thoughtful)
    for entries in read_log(folder, json.loads((folder / "manifest.json").read_text()), Faults()):
        choosing.see(entries)
    assert all(one.records for one in choosing.chosen())
    return [(one.key, one.why) for one in choosing.chosen()]


def test_three_are_shown_whichever_rules_agree(finished: Path, log: list[dict[str, Any]]) -> None:
    found = chosen(finished)
    keys = [key for key, _ in found]
    assert len(set(keys)) == len(keys) == 3
    assert keys[0] == (log[0]["index"], log[0]["sample"])
    assert found[0][1][0] == "the first of the run"
    reasons = {why for _, all_ in found for why in all_}
    assert {"the one with the most tokens thrown away", "the one with the closest tie"} <= reasons


def test_the_most_thoughts_come_first(finished: Path, log: list[dict[str, Any]]) -> None:
    last = log[-1]["index"], log[-1]["sample"]
    found = chosen(finished, last)
    assert found[0][0] == last
    assert found[0][1][0] == "the one with the most thoughts"
    assert len(found) == 3


def test_a_short_run_shows_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}')
    go(tmp_path / "p.jsonl", tmp_path / "out")
    ((key, why),) = chosen(tmp_path / "out")
    assert key == (0, 0)
    assert why[0] == "the first of the run"
