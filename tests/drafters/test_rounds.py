"""What is known of rounds, by their number of sequences."""

from __future__ import annotations

import pytest

from detgen.drafters.rounds import Rounds, RoundsBySize


def test_rounds_without_drafts_may_have_become_faster() -> None:
    """The longer ago the last was, the likelier it is that nobody drafts for once."""
    rounds = Rounds(("ngram",))
    assert not rounds.known
    rounds.learn_plain(4, 1.0, 0.5, 4)
    assert rounds.known
    assert rounds.plain == 0.5
    for _ in range(100):
        rounds.learn_drafted(20, 1.0, 2.0, 4)
    assert rounds.plain == pytest.approx(0.75)
    rounds.learn_plain(4, 1.0, 0.5, 4)
    assert rounds.plain == pytest.approx(0.5)


def test_doubts_bring_drafts_back() -> None:
    rounds = Rounds(("ngram",))
    rounds.kept.learn(4, 10.0, 1.0)
    rounds.overhead.learn(1e-3)
    for _ in range(300):
        rounds.doubt()
    assert rounds.kept.value == pytest.approx(1.0)
    assert rounds.overhead.seconds < 1e-4


def test_others_begin_with_what_is_known() -> None:
    """Of the last that were asked for; what they learn is theirs."""
    sizes = RoundsBySize(("model", "ngram"))
    four = sizes.of(4)
    four.learn_plain(4, 1.0, 0.5, 4)
    four.kept.learn(4, 1.0, 0.8)
    assert sizes.of(7) is four
    three = sizes.of(3)
    assert three is not four
    assert (three.plain, three.kept.value) == (0.5, 0.8)
    three.learn_plain(300, 1.0, 2.0, 3)
    assert three.plain > 1.5
    assert four.plain == 0.5


def test_a_way_that_was_found_to_be_best_is_kept_for_others() -> None:
    sizes = RoundsBySize(("model", "ngram"))
    sizes.of(1).learn_plain(1, 1.0, 1.0, 1)
    pace = sizes.of(1).pace
    for _ in range(200):
        pace.learn(10, 1.0 if pace.way == "model" else 2.0, 1.0, 1)
    assert pace.best == "model"
    assert sizes.of(32).pace.best == "model"


def test_who_was_asked_for_before_anything_was_known_learns_it_from_others() -> None:
    sizes = RoundsBySize(("ngram",))
    assert not sizes.of(1).known
    sizes.of(8).learn_plain(8, 1.0, 0.5, 8)
    sizes.of(8)
    assert sizes.of(1).plain == 0.5
