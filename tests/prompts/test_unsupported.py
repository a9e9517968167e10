"""Keys of a line: other names of known ones, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import DEFAULTS, error, one, read, write

from detgen.engine.request import Request
from detgen.prompts import BadLine


def test_two_names_of_max_tokens(tmp_path: Path) -> None:
    for name in ("max_tokens", "max_new_tokens", "max_completion_tokens"):
        item = one(tmp_path, json.dumps({"prompt": "a", name: 5, "task": 1}))
        assert isinstance(item, Request)
        assert (item.params.max_tokens, item.metadata) == (5, {"task": 1})
    same = one(tmp_path, '{"prompt": "a", "max_new_tokens": 5, "max_tokens": 5, "max_completion_tokens": null}')
    assert isinstance(same, Request)
    assert same.params.max_tokens == 5
    assert one(tmp_path, '{"prompt": "a", "max_new_tokens": null}') == one(tmp_path, '{"prompt": "a"}')


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"max_tokens": 4, "max_new_tokens": 5},
            "max_tokens and max_new_tokens mean the same and are given as 4 and 5; give one of them",
        ),
        (
            {"max_new_tokens": 4, "max_completion_tokens": 5},
            "max_new_tokens and max_completion_tokens mean the same and are given as 4 and 5; give one of them",
        ),
        ({"max_new_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_completion_tokens": "9"}, "max_tokens must be a whole number of at least 1, got '9'"),
    ],
)
def test_names_that_disagree_are_refused(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    assert error(tmp_path, json.dumps({"prompt": "a", **keys})) == f"p.jsonl:1: {reason}"


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("guided_whitespace_pattern", " ", ""),
        ("grammar", "root ::= x", None),
        ("json_schema", {}, {}),
        ("regex", "[0-9]+", None),
        ("structural_tag", {"choice": ["a"]}, None),
        ("best_of", 4, 1),
        ("use_beam_search", True, False),
        ("beam_search", True, False),
        ("smoothing_factor", 0.2, 0),
        ("tfs", 0.9, 1),
        ("prefix", "x", ""),
        ("suffix", "x", None),
        ("images", ["a.png"], []),
        ("image_data", "a.png", None),
        ("system", "Be brief.", ""),
        ("assistant_prefix", "Sure", None),
        ("echo", True, False),
        ("num_beams", 4, 1),
        ("length_penalty", 0.8, 1.0),
        ("typical_p", 0.9, 1),
        ("no_repeat_ngram_size", 3, 0),
        ("bad_words", ["x"], []),
        ("logits_processors", ["x"], None),
        ("prompt_logprobs", 0, False),
        ("prompt_logprobs", 1, None),
        ("functions", [{"name": "f"}], []),
        ("enable_thinking", False, None),
        ("truncate_prompt_tokens", 10, -1),
        ("skip_special_tokens", False, True),
        ("stop_strings", ["x"], None),
        ("top_logprobs", 5, 0),
        ("do_sample", False, True),  # the default temperature here is 0.5
        ("add_special_tokens", False, True),
        ("add_generation_prompt", False, True),
        ("extra_body", {"top_k": 1}, {}),
    ],
)
def test_what_would_give_another_text_is_refused(tmp_path: Path, key: str, value: Any, neutral: Any) -> None:
    if value != neutral:
        found = one(tmp_path, json.dumps({"prompt": "a", "id": "x", key: value}))
        assert isinstance(found, BadLine)
        assert (found.id, found.metadata) == ("x", {key: value})
        assert found.error.startswith(f"p.jsonl:1: {key} is ")
        assert '"metadata"' in found.error
    item = one(tmp_path, json.dumps({"prompt": "a", key: neutral}))
    assert isinstance(item, Request)
    assert item.metadata == {key: neutral}
    inside = one(tmp_path, json.dumps({"prompt": "a", "metadata": {key: value}}))
    assert isinstance(inside, Request)
    assert inside.metadata == {key: value}


def test_a_refusal_says_why_and_what_to_do(tmp_path: Path) -> None:
    assert error(tmp_path, '{"prompt": "a", "best_of": 3}') == (
        "p.jsonl:1: best_of is not supported: detgen does not choose among samples; ask for n of them; leave it out, or"
        ' put it into "metadata" if it is not a setting'
    )
    assert error(tmp_path, '{"prompt": "a", "stop_strings": "x"}') == (
        'p.jsonl:1: stop_strings is called stop here; rename it, or put it into "metadata" if it is not a setting'
    )


def test_cells_are_neutral_as_values_are(tmp_path: Path) -> None:
    text = "prompt,num_beams,use_beam_search,response_format\na,1,False,\nb,1.0,,text\nc,2,,\nd,,true,\n"
    items = read(write(tmp_path, "p.csv", text))
    assert [isinstance(item, Request) for item in items] == [True, True, False, False]


def test_metadata_as_an_object(tmp_path: Path) -> None:
    line = {"prompt": "a", "task": 1, "metadata": {"task": 1, "seed": 3, "best_of": 9, "metadata": 2}}
    item = one(tmp_path, json.dumps(line))
    assert isinstance(item, Request)
    assert item.metadata == {"task": 1, "seed": 3, "best_of": 9, "metadata": 2}
    assert item.params == DEFAULTS
    for other in ('"text"', "3", "[1]", "true"):
        item = one(tmp_path, f'{{"prompt": "a", "metadata": {other}}}')
        assert isinstance(item, Request)
        assert item.metadata == {"metadata": json.loads(other)}
    assert one(tmp_path, '{"prompt": "a", "metadata": null}') == one(tmp_path, '{"prompt": "a"}')
    assert error(tmp_path, '{"prompt": "a", "task": 1, "metadata": {"task": 2}}') == (
        "p.jsonl:1: 'task' is given beside metadata and, with another value, inside it; keep one of them"
    )
    deep = '{"prompt": "a", "metadata": ' + '{"a":' * 150 + "1" + "}" * 151
    assert error(tmp_path, deep) == "p.jsonl:1: nested more than 100 deep"
