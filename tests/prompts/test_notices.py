"""Ids of one type, seeds of single lines, and what a person hears of equal ones."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import DEFAULTS, read, write

from detgen.engine.request import Request
from detgen.prompts import open_prompts
from detgen.prompts.notices import Notices, misspelt
from detgen.prompts.source import line_seed
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED


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


# Names that data sets give their columns.
METADATA = re.findall(
    r"\w+",
    """
    it top name task tags tag step steps index idx idx_in_set row row_id line lines path file filename file_name url
    link title text body content contents input inputs output outputs instruction instructions question questions
    query answer answers choice choices option options context contexts passage passages document documents doc docs
    summary summaries article label labels class category topic topics subject level difficulty score scores rating
    rank weight weights source sources origin dataset subset split domain lang language locale country city date
    time timestamp created created_at updated updated_at year month day hour version revision author authors user
    username user_id uid uuid guid key keys value values type kind status state done error errors reason comment
    comments note notes description explanation rationale reasoning thought thoughts solution solutions test tests
    test_cases unit_tests canonical_solution entry_point code snippet function func repo repository commit message
    commit_message license stars size length num_tokens n_tokens in_tokens out_tokens input_tokens output_tokens
    token_count tokens word_count words chars total_tokens prompt_tokens completion_tokens prompt_id prompts
    prompt_name response responses completion completions generation generations target targets reference references
    gold ground_truth expected expected_output prediction predictions logprob model model_name model_id temp
    template templates prefix suffix system system_prompt role persona conversation conversations dialog dialogue
    chat history turn turns turn_id session session_id conversation_id parent parent_id children group group_id
    batch batch_id custom_id request_id sample sample_id example example_id item item_id problem problem_id
    problem_name constraint constraints hints hint image images audio video width height seeds feed need speed
    stopped stops stop_time shop min max mean median sum mode tool min_length_chars max_score min_score top_score
    meta meta_data metadata_1 extra info data payload config params parameters settings args kwargs flags flag bool
    format formats schema pattern regex grammar_error sentiment emotion toxicity entity entities aspect premise
    hypothesis claim evidence claim_id gender age price product brand store review review_id stop_reason
    finish_reason seed_id seed_task seed_text is_good is_valid valid hash md5 sha sha256 digest checksum
    deterministic_hash
""",
)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"),
        ("temperture", "temperature"),
        ("tempreature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_token", "max_new_tokens"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("logprops", "logprobs"),
        ("determinstic", "deterministic"),
        ("stpo", "stop"),
        ("seeed", "seed"),
        ("SEED", "seed"),
        ("chat_template_kwarg", "chat_template_kwargs"),
        ("reponse_format", "response_format"),
    ],
)
def test_typing_errors_are_recognized(key: str, meant: str) -> None:
    assert misspelt(key) == meant


@pytest.mark.parametrize("key", ["", "_", "é", "id_", "x" * 5000, "\ud800\ud800\ud800\ud800", *METADATA])
def test_names_of_their_own_are_not_taken_for_typing_errors(key: str) -> None:
    assert misspelt(key) is None


def test_known_and_refused_keys_are_no_typing_errors() -> None:
    assert not any(misspelt(key) for key in (*UNSUPPORTED, *OTHER_NAMES, "guided_json", "prompt", "id", "n"))


def heard_of(path: Path, **options: Any) -> list[str]:
    """What a person hears of an input."""
    source = open_prompts(str(path))
    source.inspect()
    said: list[str] = []
    list(source.read(DEFAULTS, say=said.append, **options))
    return said


def test_typing_errors_are_said_once_at_the_end(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{n}", "temprature": 1} for n in range(4)] + [{"prompt": "x", "topP": 1, "max_token": 3}]
    lines += [{"prompt": 3, "Seed": 3}, {"prompt": "y", "sedd": 1, "task": 2, "metadata": {"temprature": 1}}]
    path = write(tmp_path, "p.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert heard_of(path) == [
        "6 lines have keys that look like a typing error and change nothing (copied to metadata): temprature in 4"
        " (first in p.jsonl:1; did you mean temperature?), topP in 1 (first in p.jsonl:5; did you mean top_p?),"
        " max_token in 1 (first in p.jsonl:5; did you mean max_tokens?), and 1 more"
    ]
    assert heard_of(write(tmp_path, "q.jsonl", '{"prompt": "a", "task": 1}\n{"prompt": "b"}\n')) == []
    items = [item for item in read(path) if isinstance(item, Request)]
    assert items[0].metadata == {"temprature": 1}
