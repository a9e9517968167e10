"""What samples come to: how often an answer is the best of a prompt's completions."""

from __future__ import annotations

from typing import Any

import pytest

from detgen.engine.score_requests import Score, ScoreRequest
from detgen.outputs.totals import Answers, Totals

CHOICES = ("yes", "certainly not")


def counted(answer: Any, logprobs: tuple[float, ...], choices: tuple[Any, ...] = CHOICES, **fields: Any) -> Answers:
    request = ScoreRequest(0, 0, prompt="x", completions=choices, metadata={"answer": answer})
    found = Answers()
    found.add(request, [Score(request, i, (1,), (each,), (True,), 1, **fields) for i, each in enumerate(logprobs)])
    return found


@pytest.mark.parametrize("answer", [1, "certainly not"])
def test_an_answer_by_number_or_text(answer: Any) -> None:
    """The long completion is less likely, but more likely per character."""
    assert counted(answer, (-6.0, -13.0)) == Answers(1, 0, 1)
    assert counted(answer, (-14.0, -13.0)) == Answers(1, 1, 1)


def test_of_equal_ones_the_first_is_the_best() -> None:
    assert counted(0, (-2.0, -2.0)).right == 1
    assert counted(1, (-2.0, -2.0)).right == 0


@pytest.mark.parametrize("answer", [2, -1, True, "no", 0.0, [0], {"a": 1}])
def test_an_answer_that_is_no_completion_is_told(answer: Any) -> None:
    assert counted(answer, (-1.0, -2.0)) == Answers(unknown=1)


def test_what_is_not_asked_or_has_no_score_is_not_counted() -> None:
    assert counted(None, (-1.0, -2.0)) == Answers()
    assert counted(0, (-1.0,), ("yes",)) == Answers()
    assert counted(0, (-1.0, -2.0), error="e") == Answers()


def test_token_ids_have_no_length_in_characters() -> None:
    assert counted(0, (-1.0, -2.0), ((3, 4), (5,))) == Answers(1, 1, 0)


def test_a_manifest_has_answers_where_there_are_any() -> None:
    totals = Totals()
    assert "answers" not in totals.summary()
    totals.answers.prompts += 1
    assert totals.summary()["answers"]["prompts"] == 1
