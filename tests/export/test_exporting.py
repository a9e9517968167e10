"""`detgen export`: tables and results of a finished folder, which stays as it is."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from helpers.checks import Silent
from helpers.examples import examples
from helpers.fakes import Watcher, go, lines, stopping_at
from helpers.tampering import edit_lines, edit_manifest, renew
from hypothesis import example, given
from hypothesis import strategies as st

from detgen.engine.config import EngineConfig
from detgen.errors import OutputError, PromptsError
from detgen.export import FORMS
from detgen.export.exporting import Exported, export_run
from detgen.export.tables import COLUMNS, row_of, write_table
from detgen.verify.replay.claims import check_early

MESSAGES = [{"role": "user", "content": "hi"}]
LINES: list[Any] = [
    {"id": "a", "prompt": 'one\r\n"two", three', "n": 2, "seed": 5, "task": {"k": [1]}},
    {"prompt": 3, "task": "t"},
    {"messages": MESSAGES, "logprobs": 0},
    {"prompt_token_ids": [4, 5]},
    {"prompt": "too long"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n{broken")
    return path


@pytest.fixture
def out(tmp_path: Path, prompts: Path) -> Path:
    go(prompts, tmp_path / "out")
    return tmp_path / "out"


def state(folder: Path) -> dict[str, tuple[str, int]]:
    return {p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def export(out: Path, form: str, to: Path, prompts: Path | None = None, watcher: Watcher | None = None) -> Exported:
    return export_run(out, form, prompts and str(prompts), to, watcher or Silent())


def rows(form: str, path: Path) -> list[dict[str, Any]]:
    """A table read back; cells of CSV are texts."""
    if form == "csv":
        return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
    table = load_from_disk(str(path)) if form == "hf" else Dataset.from_parquet(str(path), cache_dir=f"{path}.cache")
    return list(table)


@pytest.mark.parametrize("form", ["csv", "parquet", "hf"])
def test_a_table_has_a_row_for_each_line(tmp_path: Path, out: Path, form: str) -> None:
    before = state(out)
    exported = export(out, form, tmp_path / "table")
    assert exported == Exported(tmp_path / "table", 7, "row")
    assert state(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "prompts.jsonl", "table"]
    found = rows(form, tmp_path / "table")
    assert [list(row) for row in found] == [list(COLUMNS)] * 7
    for row, line in zip(found, lines(out / "outputs.jsonl"), strict=True):
        for name in ("index", "sample", "text", "finish_reason", "prompt_tokens", "completion_tokens", "seed", "error"):
            value = line.get(name)
            assert row[name] == (("" if value is None else str(value)) if form == "csv" else value), name
        assert row["id"] == str(line["id"])
        tokens = line.get("token_ids")
        assert (json.loads(row["token_ids"] or "null") if form == "csv" else row["token_ids"]) == tokens
    nothing = "" if form == "csv" else None
    chat = '[{"role":"user","content":"hi"}]'
    expected = [LINES[0]["prompt"], LINES[0]["prompt"], nothing, chat, "[4,5]", "too long", nothing]
    assert [row["prompt"] for row in found] == expected
    assert json.loads(found[0]["metadata"]) == {"task": {"k": [1]}}
    assert found[3]["metadata"] == nothing
    logprobs = found[3]["logprobs"]
    assert (json.loads(logprobs) if form == "csv" else logprobs) == [-0.1] * 3
    assert found[0]["logprobs"] == nothing


@pytest.mark.parametrize("form", ["csv", "parquet", "openai"])
def test_the_same_bytes_each_time(tmp_path: Path, out: Path, form: str) -> None:
    for name in ("a", "b"):
        export(out, form, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_results_are_those_of_the_run(tmp_path: Path, out: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "with", output_format="openai")
    assert export(out, "openai", tmp_path / "x").unit == "result"
    assert (tmp_path / "x").read_bytes() == (tmp_path / "with" / "results.jsonl").read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_place_is_named_after_the_folder(
    tmp_path: Path, out: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = export_run(out, form, None, None, Silent()).path
    assert path == Path(f"out{FORMS[form]}")
    assert path.exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_relative_input_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Also where the whole project was moved; what is of that name in the current folder is not taken for it."""
    project, elsewhere = tmp_path / "project", tmp_path / "else" / "where"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    (project / "data" / "p.txt").write_text("one\n")
    monkeypatch.chdir(project)
    go(Path("data/p.txt"), Path("runs/out"))
    if moved:
        project = project.rename(tmp_path / "renamed")
    (elsewhere / "data").mkdir()
    (elsewhere / "data" / "p.txt").write_text("another\n")
    monkeypatch.chdir(elsewhere)
    watcher = Watcher()
    export_run(project / "runs" / "out", "csv", None, Path("a.csv"), watcher)
    assert (watcher.messages, rows("csv", Path("a.csv"))[0]["prompt"]) == ([], "one")
    check_early(project / "runs" / "out", EngineConfig(), None, Silent())
    (project / "data" / "p.txt").rename(elsewhere / "data" / "p.txt")
    export_run(project / "runs" / "out", "csv", None, Path("b.csv"), watcher)
    assert (watcher.messages, rows("csv", Path("b.csv"))[0]["prompt"]) == ([], "one")


def test_prompts_that_are_gone_are_left_out_of_tables(tmp_path: Path, out: Path, prompts: Path) -> None:
    prompts.rename(tmp_path / "moved.jsonl")
    watcher = Watcher()
    export(out, "csv", tmp_path / "a", watcher=watcher)
    assert {row["prompt"] for row in rows("csv", tmp_path / "a")} == {""}
    (message,) = watcher.messages
    assert message.startswith("prompts are left out where outputs.jsonl has none: there is no file")
    assert message.endswith("name them as PROMPTS")
    export(out, "csv", tmp_path / "b", tmp_path / "moved.jsonl")
    assert rows("csv", tmp_path / "b")[0]["prompt"] == LINES[0]["prompt"]
    with pytest.raises(PromptsError, match=r"cannot read the run's prompts: there is no file .*; name them as PROMPTS"):
        export(out, "openai", tmp_path / "c")
    assert export(out, "openai", tmp_path / "c", tmp_path / "moved.jsonl").count == 6


def test_echoed_prompts_need_no_file(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "echo", echo=True)
    prompts.unlink()
    export(tmp_path / "echo", "csv", tmp_path / "a")
    found = [row["prompt"] for row in rows("csv", tmp_path / "a")]
    assert found == [LINES[0]["prompt"], LINES[0]["prompt"], "", '[{"role":"user","content":"hi"}]', "[4,5]", "", ""]


def test_other_prompts_are_refused(tmp_path: Path, out: Path, prompts: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text() + "\n")
    for form in FORMS:
        with pytest.raises(PromptsError, match=r"other\.jsonl is not what the run read: its SHA-256 is different"):
            export(out, form, tmp_path / "x", other)
    assert not (tmp_path / "x").exists()


def test_a_limit_holds_for_the_prompts_too(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "some", limit=2)
    assert export(tmp_path / "some", "csv", tmp_path / "a").count == 3
    assert export(tmp_path / "some", "openai", tmp_path / "b").count == 2


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n" * 20)
    go(tmp_path / "p.txt", tmp_path / "out", build=stopping_at(3))
    with pytest.raises(OutputError, match=r"not finished \(its status is interrupted\); give the command of the run"):
        export(tmp_path / "out", "csv", tmp_path / "x")


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda out: (out / "manifest.json").unlink(), "has no manifest.json; give the output folder of a detgen run"),
    (lambda out: (out / "manifest.json").write_text("{}"), "detgen writes no such manifest"),
    (lambda out: edit_manifest(out, lambda m: m.update(detgen="0.0.1")), "was written by detgen '0.0.1', this is"),
    (lambda out: (out / "outputs.jsonl").unlink(), r"cannot read .*outputs\.jsonl: No such file or directory; restore"),
    (lambda out: (out / "outputs.jsonl").write_text("{}\n"), r"outputs\.jsonl:1 is not a line of a run; restore"),
    (lambda out: (out / "outputs.jsonl").write_text("\n"), r"outputs\.jsonl:1 is not a line of a run; restore"),
    (
        lambda out: edit_lines(out / "outputs.jsonl", lambda ls: ls[0].update(text="x")),
        r"outputs\.jsonl is not what the run wrote: its SHA-256 is different; restore the file, or run again",
    ),
    (
        lambda out: (edit_lines(out / "outputs.jsonl", lambda ls: ls[0].update(text=5)), renew(out)),
        r"outputs\.jsonl:1 is not a line of a run; restore",
    ),
    (
        lambda out: (edit_lines(out / "outputs.jsonl", lambda ls: ls.pop()), renew(out)),
        r"outputs\.jsonl has no line of prompt 6: the prompts are not those of the run",
    ),
]


@pytest.mark.parametrize("form", ["csv", "hf", "openai"])
@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_folder_that_was_damaged_is_refused(
    tmp_path: Path, out: Path, form: str, change: Callable[[Path], Any], words: str
) -> None:
    change(out)
    with pytest.raises(OutputError, match=words):
        export(out, form, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "prompts.jsonl"]


def test_places_that_are_refused(tmp_path: Path, out: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "inside").symlink_to(out)
    for path, words in (
        (tmp_path / "there", "exists already; remove it, or choose another place with -o"),
        (tmp_path / "link", "exists already; remove it"),
        (out / "x", "is in the output folder, which export leaves as it is; choose another place with -o"),
        (tmp_path / "inside" / "x", "is in the output folder"),
        (out, "is in the output folder"),
        (tmp_path / "no" / "x", r"there is no folder .*no; choose another place with -o"),
        (tmp_path / "there" / "x", r"there is no folder .*there"),
    ):
        for form in FORMS:
            with pytest.raises(OutputError, match=words):
                export(out, form, path)
    assert (tmp_path / "there").read_text() == "mine"


def test_the_parts_of_answers_are_columns() -> None:
    call = {"id": "9", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}, "error": "é"}
    line: Any = {"id": 1, "index": 0, "sample": 0, "reasoning_content": "a", "content": None, "tool_calls": [call]}
    row = row_of(line, None)
    assert list(row)[-3:] == ["reasoning_content", "content", "tool_calls"]
    assert (row["reasoning_content"], row["content"], json.loads(row["tool_calls"])) == ("a", None, [call])


texts = st.text(st.characters(exclude_categories=()) | st.sampled_from('",\r\n\ud800 \x00'))
values = st.none() | texts
any_lines = st.fixed_dictionaries(
    {"id": texts | st.integers(), "index": st.integers(0, 9), "sample": st.integers(0, 9)},
    optional={"text": texts, "error": texts, "token_ids": st.lists(st.integers(0, 2**62)), "metadata": values},
)


@given(st.lists(any_lines, min_size=1, max_size=4))
@example([{"id": "\ud800", "index": 0, "sample": 0, "text": "\udfff,\r", "error": '"', "metadata": "\ud800\x00"}])
@example([{"id": 1, "index": 0, "sample": 0}, {"id": 2, "index": 1, "sample": 0, "text": "\r"}])
@examples(15)
def test_whatever_is_in_a_line_can_be_read_back(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    wanted = [row_of(line, None) for line in found]
    for form in ("csv", "parquet"):
        assert write_table(wanted, form, folder / form, "0") == len(found)
    assert rows("parquet", folder / "parquet") == wanted
    for name in ("id", "text", "error", "metadata"):
        assert [row[name] for row in rows("csv", folder / "csv")] == [row[name] or "" for row in wanted]
