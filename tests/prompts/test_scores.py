"""Records with completions become requests to score; whatever is wrong with one is named, with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from detgen.engine.request import Request
from detgen.engine.score_requests import ScoreRequest
from detgen.prompts import BadLine, open_prompts, read_scores


def read(path: Path, *, column: str | None = None, **named: Any) -> list[Request | BadLine]:
    prompts = open_prompts(str(path), column)
    prompts.inspect()
    return list(read_scores(prompts, **named))


def one(folder: Path, record: Any) -> Request | BadLine:
    path = folder / "p.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (found,) = read(path)
    return found


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completions": ("b",)}),
        ({"prompt": "a", "completions": ["b", " "]}, {"prompt": "a", "completions": ("b", " ")}),
        ({"prompt_token_ids": [1, 2], "completion": "b"}, {"token_ids": (1, 2), "completions": ("b",)}),
        ({"text": "a b"}, {"prompt": "a b", "completions": None}),
        ({"text": "a", "completion": None, "prompt": ""}, {"prompt": "a", "completions": None}),
        ({"prompt": "a", "completion": "b", "text": None}, {"prompt": "a", "completions": ("b",)}),
        (
            {"prompt": "a", "completion": "b", "temperature": 0.5, "max_new_tokens": 3, "x": 1, "metadata": {"y": 2}},
            {"completions": ("b",), "metadata": {"temperature": 0.5, "max_new_tokens": 3, "x": 1, "y": 2}},
        ),
        ({"text": "a", "temperature": "hot"}, {"metadata": {"temperature": "hot"}}),
        (
            {"messages": [{"role": "user", "content": "a"}], "completion": "b", "tools": [{"x": 1}]},
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"x": 1}], "completions": ("b",)},
        ),
    ],
)
def test_records(tmp_path: Path, record: dict[str, Any], expected: dict[str, Any]) -> None:
    found = one(tmp_path, record)
    assert isinstance(found, ScoreRequest), found
    assert {name: getattr(found, name) for name in expected} == expected
    assert (found.index, found.line, found.id, found.echo) == (0, 1, 1, False)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (
            {"prompt": "a"},
            "there is neither completion nor completions; a text to be scored as a whole is given as text",
        ),
        ({"completion": "b"}, "neither prompt nor messages is given"),
        ({"prompt": "", "completion": "b"}, "prompt is empty"),
        ({"prompt": 3, "completion": "b"}, "prompt must be a string, got a number"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": 3}, "completion must be a string, got a number"),
        ({"prompt": "a", "completion": ["b"]}, "completion must be a string, got a list"),
        ({"prompt": "a", "completions": "b"}, "completions must be a list, got a string"),
        ({"prompt": "a", "completions": []}, "completions is empty"),
        ({"prompt": "a", "completions": ["b", None]}, "completions[1] must be a string, got null"),
        ({"prompt": "a", "completions": ["b", ""]}, "completions[1] is empty"),
        ({"prompt": "a", "completions": ["\ud800"]}, "completions[0] holds half a character, \\ud800 at position 0"),
        (
            {"prompt": "a", "completion": "b", "completions": ["b"]},
            "both completion and completions are given; give one",
        ),
        (
            {"prompt": "a", "text": "b"},
            "both prompt and text are given; give a prompt with completions, or a text alone",
        ),
        ({"text": "b", "completion": "c"}, "both completion and text are given; give a prompt with completions"),
        ({"text": ["b"]}, "text must be a string, got a list"),
        ({"text": ""}, "text is empty"),
        ({"text": "\udfff"}, "text holds half a character"),
        ({"text": "a", "id": 1.5}, "id must be a string or a whole number, got a number"),
        ({"prompt": "a", "completion": "b", "num_beams": 4}, "num_beams is not supported"),
        ({"prompt": "a", "completion": "b", "tools": [{}]}, "tools needs messages"),
        (["a", "b"], 'a prompt must be an object such as {"prompt": "..."}, got a list'),
    ],
)
def test_errors(tmp_path: Path, record: Any, error: str) -> None:
    found = one(tmp_path, record)
    assert isinstance(found, BadLine), found
    assert found.error.startswith(f"p.jsonl:1: {error}")


def test_an_error_keeps_id_and_metadata(tmp_path: Path) -> None:
    found = one(tmp_path, {"id": "x", "prompt": "a", "completion": 3, "label": 1, "seed": 4})
    assert isinstance(found, BadLine)
    assert (found.id, found.metadata) == ("x", {"label": 1, "seed": 4})


def test_a_line_of_plain_text_is_scored_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a b\nc\n")
    found = read(tmp_path / "p.txt", echo=True)
    assert [(f.prompt, f.completions, f.echo) for f in found if isinstance(f, ScoreRequest)] == [
        ("a b", None, True),
        ("c", None, True),
    ]


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('prompt,completion,note\n"a",b,1\nc,,2\n')
    first, second = read(tmp_path / "p.csv")
    assert isinstance(first, ScoreRequest)
    assert (first.prompt, first.completions, first.metadata) == ("a", ("b",), {"note": "1"})
    assert isinstance(second, BadLine)
    assert second.error == "p.csv:3: completion is empty"
    table = pa.table({"prompt": ["a", "b"], "completions": [["x", "y"], ["z"]]})
    pa.parquet.write_table(table, tmp_path / "p.parquet")
    assert [f.completions for f in read(tmp_path / "p.parquet") if isinstance(f, ScoreRequest)] == [("x", "y"), ("z",)]


def test_a_column_that_is_named_holds_prompts_or_texts(tmp_path: Path) -> None:
    """Texts where there are no completions beside it."""
    pa.parquet.write_table(pa.table({"body": ["a", "b"]}), tmp_path / "p.parquet")
    texts = read(tmp_path / "p.parquet", column="body")
    assert [(f.prompt, f.completions) for f in texts if isinstance(f, ScoreRequest)] == [("a", None), ("b", None)]
    (tmp_path / "p.jsonl").write_text('{"q": "a", "completion": "b"}\n{"q": "a"}\n{"prompt": "a"}\n')
    asked, text, missing = read(tmp_path / "p.jsonl", column="q")
    assert isinstance(asked, ScoreRequest)
    assert isinstance(text, ScoreRequest)
    assert isinstance(missing, BadLine)
    assert (asked.completions, text.completions) == (("b",), None)
    assert missing.error == "p.jsonl:3: there is no 'q', which --prompt-column names"


def test_equal_ids_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "p.jsonl").write_text('{"id": 1, "text": "a", "temprature": 1}\n' * 2)
    read(tmp_path / "p.jsonl", say=said.append)
    assert said == ["p.jsonl:2 has the id of an earlier line; tell their outputs apart by index"]
