"""Keys that look like typing errors, and names of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.reading import DEFAULTS, read, write

from detgen.engine.request import Request
from detgen.prompts import open_prompts
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
