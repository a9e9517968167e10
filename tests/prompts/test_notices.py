"""Ids of one type, seeds of single lines, and what a person hears of equal ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import DEFAULTS, read, write

from detgen.engine.request import Request
from detgen.prompts import open_prompts
from detgen.prompts.notices import Notices
from detgen.prompts.source import line_seed


def ids(path: Path | str, limit: int | None = None) -> list[str | int]:
    return [item.id for item in read(path, limit)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (['{"prompt": "a"}', '{"prompt": "b", "id": "x"}', "{broken", '{"prompt": 3}'], ["1", "x", "3", "4"]),
        (['{"prompt": "a"}', '{"prompt": "b"}', "{broken"], [1, 2, 3]),
        (['{"prompt": "a"}', '{"prompt": "b", "id": 7}'], [1, 7]),
        (['{"prompt": "a"}', '{"prompt": "b", "id": null}', '{"prompt": "b", "id": true}'], [1, 2, 3]),
        (['{"prompt": "a", "id": 7}', '{"prompt": "b", "id": "x"}', '{"prompt": "c"}'], [7, "x", "3"]),
        (['{"prompt": "a"}', '{"prompt": "b", "task": {"id": "x"}}', '{"prompt": "\\"id\\""}'], [1, 2, 3]),
        (['{"prompt": "a"}', '{"prompt": "b", "\\u0069d": "x"}'], ["1", "x"]),
        (['{"prompt": "a"}', '{"prompt": "b", "id": "x", "id": 3}'], [1, 3]),  # the last is its id, and it cannot run
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_numbers_are_strings_where_other_ids_are(
    tmp_path: Path, lines: Sequence[str], found: list[str | int], ending: str
) -> None:
    if ending == "jsonl":
        text = "\n".join(lines)
    else:
        text = f"[{', '.join('3' if line == '{broken' else line for line in lines)}]"
    path = write(tmp_path, f"p.{ending}", text)
    assert ids(path) == found
    assert ids(path, 1) == found[:1], "the first lines of a run are those of the whole run"


def test_ids_of_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert ids(write(tmp_path, "p.csv", "id,prompt\n,a\n7,b\n")) == ["2", "7"]
    assert ids(write(tmp_path, "q.csv", "id,prompt\n,a\n,b\n")) == [2, 3]
    pq.write_table(pa.table({"id": pa.array([None, "x"]), "prompt": ["a", "b"]}), tmp_path / "p.parquet")
    pq.write_table(pa.table({"id": pa.array([None, 7]), "prompt": ["a", "b"]}), tmp_path / "q.parquet")
    pq.write_table(pa.table({"id": pa.array([None, None], pa.string()), "prompt": ["a", "b"]}), tmp_path / "r.parquet")
    assert [ids(tmp_path / f"{name}.parquet") for name in "pqr"] == [["1", "x"], [1, 7], [1, 2]]


def test_the_type_of_a_column_decides_in_a_dataset(tmp_path: Path) -> None:
    import datasets

    rows = {"p": [{"id": None, "prompt": "a"}, {"id": "x", "prompt": "b"}], "q": [{"prompt": "a"}, {"prompt": "b"}]}
    for name, content in rows.items():
        datasets.Dataset.from_list(content).save_to_disk(str(tmp_path / name))
    assert ids(tmp_path / "p") == ["1", "x"]
    assert ids(tmp_path / "q") == [1, 2]


def test_the_seed_of_a_line(tmp_path: Path) -> None:
    """The values are promised: a new version gives the same samples."""
    assert [line_seed(0, 1), line_seed(0, "1"), line_seed(7, "x")] == SEEDS
    lines = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 5}, {"prompt": "a", "seed": None}]
    source = open_prompts(str(write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))))
    items = [item for item in source.read(DEFAULTS, seed_per_line=True) if isinstance(item, Request)]
    assert [item.params.seed for item in items] == [line_seed(0, 1), line_seed(0, 2), 5, line_seed(0, 4)]
    assert all(0 <= line_seed(2**63 - 1, n) < 2**63 for n in range(1000))
    assert len({line_seed(0, n) for n in range(10_000)}) == 10_000


SEEDS = [8091084484253266631, 6572901159697220586, 8976712233219893472]


def heard(folder: Path, *lines: dict[str, Any], **options: Any) -> list[str]:
    """What a person hears of lines."""
    source = open_prompts(str(write(folder, "p.jsonl", "\n".join(map(json.dumps, lines)))))
    source.inspect()
    said: list[str] = []
    list(source.read(DEFAULTS, say=said.append, **options))
    return said


SAME = "p.jsonl:3 has the prompt, the settings and the seed of an earlier line, so their samples are equal; "


@pytest.mark.parametrize("content", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_equal_samples_are_said_once(tmp_path: Path, content: dict[str, Any]) -> None:
    other = {"prompt": "b"}
    assert heard(tmp_path, content, other, content, content, other) == [
        SAME + "--seed-per-line derives a seed from --seed and the id for each line that sets none"
    ]


@pytest.mark.parametrize(
    "difference", [{"seed": 2}, {"temperature": 0.6}, {"temperature": 0}, {"max_tokens": 9}, {"prompt": "b"}]
)
def test_different_samples_are_not_said_to_be_equal(tmp_path: Path, difference: dict[str, Any]) -> None:
    assert heard(tmp_path, {"prompt": "a"}, {"prompt": "a", **difference}) == []
    assert heard(tmp_path, {"prompt": "a", "temperature": 0}, {"prompt": "a", "temperature": 0}) == []


def test_seeds_of_lines_make_samples_differ(tmp_path: Path) -> None:
    line = {"prompt": "a"}
    assert heard(tmp_path, line, line, line, seed_per_line=True) == []
    own = {**line, "seed": 5}
    assert heard(tmp_path, own, line, own, seed_per_line=True) == [
        SAME + "give such lines another id, or another seed where they have one of their own"
    ]


def test_equal_ids_are_said_once(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{n}", "id": id} for n, id in enumerate(["a", "b", "b", "a", "a"])]
    assert heard(tmp_path, *lines) == ["p.jsonl:3 has the id of an earlier line; tell their outputs apart by index"]
    assert heard(tmp_path, {"prompt": "a", "id": 2}, {"prompt": "b"}) == [
        "p.jsonl:2 has the id of an earlier line; tell their outputs apart by index"
    ]
    assert heard(tmp_path, {"prompt": "a", "id": 2}, {"prompt": "b", "id": "2"}) == []


def test_noticing_keeps_no_more_for_more_lines() -> None:
    said: list[str] = []
    notices = Notices("p.jsonl", said.append, seed_per_line=False)
    held = pickle.dumps((notices._ids, notices._sampled))
    for n in range(2000):
        notices.record({"".join(c.upper() if n >> i & 1 else c for i, c in enumerate("temperature")): 1}, n)
        notices.request(Request(n, n, prompt=f"p{n}", params=DEFAULTS, line=n))
    assert len(pickle.dumps((notices._ids, notices._sampled))) == len(held)
    assert len(notices._misspelt) == 100
    notices.end()
    assert [text[:15] for text in said] == ["1,999 lines hav"]
    assert said[0].endswith(", and 97 more")


def test_what_came_just_before_is_always_noticed() -> None:
    for n in range(300):
        said: list[str] = []
        notices = Notices("p.jsonl", said.append, seed_per_line=False)
        for _ in range(2):
            notices.request(Request(0, "x", prompt=f"p{n}", params=DEFAULTS, line=n))
        assert len(said) == 2
