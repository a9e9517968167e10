"""Keys of a line: other names of known ones, those that are refused, and typing errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import DEFAULTS, error, one, read, write

from detgen.engine.request import Request
from detgen.prompts import BadLine, open_prompts
from detgen.prompts.spelling import misspelt
from detgen.prompts.unsupported import OTHER_NAMES, UNSUPPORTED

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
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("guided_json", {"type": "object"}, None),
        ("guided_choice", ["a", "b"], []),
        ("guided_regex", "a+", ""),
        ("grammar", "root ::= x", None),
        ("json_schema", {}, {}),
        ("structured_outputs", {"choice": ["a"]}, None),
        ("best_of", 4, 1),
        ("use_beam_search", True, False),
        ("beam_search", True, False),
        ("smoothing_factor", 0.2, 0),
        ("tfs", 0.9, 1),
        ("prefix", "x", ""),
        ("suffix", "x", None),
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
        ("tool_choice", "required", "auto"),
        ("tool_choice", {"type": "function"}, "none"),
        ("functions", [{"name": "f"}], []),
        ("reasoning_effort", "high", None),
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
        ' put it into "metadata" if it is no setting'
    )
    assert error(tmp_path, '{"prompt": "a", "stop_strings": "x"}') == (
        'p.jsonl:1: stop_strings is called stop here; rename it, or put it into "metadata" if it is no setting'
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


def heard(path: Path, **options: Any) -> list[str]:
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
    assert heard(path) == [
        "6 lines have keys that look like a typing error and change nothing (copied to metadata): temprature in 4"
        " (first in p.jsonl:1; did you mean temperature?), topP in 1 (first in p.jsonl:5; did you mean top_p?),"
        " max_token in 1 (first in p.jsonl:5; did you mean max_tokens?), and 1 more"
    ]
    assert heard(write(tmp_path, "q.jsonl", '{"prompt": "a", "task": 1}\n{"prompt": "b"}\n')) == []
    items = [item for item in read(path) if isinstance(item, Request)]
    assert items[0].metadata == {"temprature": 1}
