"""What is asked of the input and the output: a column, seeds of lines, prompts beside outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import Watcher, content, go, lines, manifest_of, stopping_at

from detgen.params import SamplingParams
from detgen.prompts.source import line_seed

WARM = SamplingParams(max_tokens=3, temperature=1.0, seed=7)


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    """Prompts under another key, some of them equal, most without ids."""
    records: list[dict[str, Any]] = [{"q": "same", "prompt": f"prompt {n}", "task": n} for n in range(8)]
    records[2]["id"] = "two"
    records[3]["seed"] = 5
    records[4]["q"] = [{"role": "user", "content": "hi"}]
    records[5]["q"] = [4, 5, 6]
    records[6]["q"] = 3
    path = tmp_path / "asking.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("change", "with_it", "without"),
    [
        ({"prompt_column": "q"}, "prompt column: None -> q", "prompt column: q -> None"),
        ({"seed_per_line": True}, "seed_per_line: False -> True", "seed_per_line: True -> False"),
        ({"echo": True}, "echo: False -> True", "echo: True -> False"),
    ],
)
def test_what_is_asked_may_change_on_the_way(
    tmp_path: Path, asking: Path, change: dict[str, Any], with_it: str, without: str
) -> None:
    """What fits is taken, and the bytes are those of a run that was asked so from the beginning."""
    out, watcher = tmp_path / "out", Watcher()
    go(asking, tmp_path / "plain", params=WARM)
    go(asking, tmp_path / "whole", params=WARM, **change)
    assert go(asking, out, build=stopping_at(2), params=WARM, **change).status == "interrupted"
    assert go(asking, out, watcher, params=WARM).status == "finished"
    assert watcher.messages[0].startswith(f"{out}: {without}. ")
    assert content(out) == content(tmp_path / "plain")
    watcher.messages.clear()
    assert go(asking, out, watcher, params=WARM, **change).resumed > 0
    assert watcher.messages[0].startswith(f"{out}: {with_it}. ")
    assert content(out) == content(tmp_path / "whole")
    assert go(asking, out, params=WARM).fresh.samples == 0, "what was asked first is still there"
    assert content(out) == content(tmp_path / "plain")


def test_the_manifest_has_what_was_asked(tmp_path: Path, asking: Path) -> None:
    go(asking, tmp_path / "a", prompt_column="q", seed_per_line=True, echo=True)
    manifest = manifest_of(tmp_path / "a")
    assert manifest["input"]["prompt_column"] == "q"
    assert (manifest["parameters"]["seed_per_line"], manifest["parameters"]["echo"]) == (True, True)
    go(asking, tmp_path / "b")
    manifest = manifest_of(tmp_path / "b")
    assert manifest["input"]["prompt_column"] is None
    assert (manifest["parameters"]["seed_per_line"], manifest["parameters"]["echo"]) == (False, False)


def test_prompts_are_beside_outputs(tmp_path: Path, asking: Path) -> None:
    go(asking, tmp_path / "a", prompt_column="q")
    go(asking, tmp_path / "b", prompt_column="q", echo=True)
    plain, found = lines(tmp_path / "a" / "outputs.jsonl"), lines(tmp_path / "b" / "outputs.jsonl")
    assert found[0]["prompt"] == "same"
    assert list(found[0])[:5] == ["id", "index", "sample", "prompt", "text"]
    assert found[4]["messages"] == [{"role": "user", "content": "hi"}]
    assert found[5]["prompt_token_ids"] == [4, 5, 6]
    assert "error" in found[6]
    echoed = {"prompt", "messages", "prompt_token_ids"}
    assert [{k: v for k, v in line.items() if k not in echoed} for line in found] == plain


def test_the_seed_of_a_line_is_in_its_output(tmp_path: Path, asking: Path) -> None:
    watcher = Watcher()
    go(asking, tmp_path / "a", watcher, prompt_column="q", seed_per_line=True, params=WARM)
    found = lines(tmp_path / "a" / "outputs.jsonl")
    assert [line.get("seed") for line in found] == [
        *(line_seed(7, id) for id in ("1", "2", "two")), 5, *(line_seed(7, id) for id in ("5", "6")), None,
        line_seed(7, "8"),
    ]  # fmt: skip
    assert len({str(line["token_ids"]) for line in found if "text" in line}) == 7
    assert watcher.messages == []
    alone = [{"prompt": "same", "id": "two", "seed": found[2]["seed"], "task": 2}]
    (tmp_path / "alone.jsonl").write_text(json.dumps(alone[0]))
    go(tmp_path / "alone.jsonl", tmp_path / "b", params=WARM)
    (again,) = lines(tmp_path / "b" / "outputs.jsonl")
    assert {**again, "index": 2} == found[2]


def test_what_a_person_should_hear_is_said_while_it_runs(tmp_path: Path, asking: Path) -> None:
    with asking.open("a") as file:
        file.write('{"q": "last", "temprature": 1}\n')
    watcher = Watcher()
    go(asking, tmp_path / "a", watcher, prompt_column="q", params=WARM)
    assert watcher.messages == [
        "asking.jsonl:2 has the prompt, the settings and the seed of an earlier line, so their samples are equal;"
        " --seed-per-line derives a seed from --seed and the id for each line that sets none",
        "1 line has a key that looks like a typing error and changes nothing (copied to metadata): temprature in 1"
        " (first in asking.jsonl:9; did you mean temperature?)",
    ]
    assert b"temprature" in (tmp_path / "a" / "outputs.jsonl").read_bytes()
    assert b"did you mean" not in b"".join(content(tmp_path / "a").values())


def test_a_run_in_which_nothing_ran_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": 1}\n{broken\n{"prompt": "too long"}\n')
    assert go(path, tmp_path / "a").all_failed
    assert go(path, tmp_path / "a").all_failed, "nor does a second call make it a success"
    path.write_text('{"prompt": 1}\n{"prompt": "good"}\n')
    assert not go(path, tmp_path / "b").all_failed
