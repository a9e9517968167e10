from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from detgen.bench.synthetic import SyntheticDrafter, best_draft_tokens
from detgen.drafters.protocol import Draft
from detgen.passes.cost import PassCost

KNOWN = [list(range(100, 2100)), list(range(2000))]


class Model:
    name = "model"

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def draft(self, seqs: Sequence[Any], lengths: list[int]) -> list[Draft]:
        self.lengths.append(lengths)
        return [Draft([0] * n, "model") for n in lengths]


def sequence(index: int, generated: int) -> Any:
    return SimpleNamespace(request=SimpleNamespace(index=index), generated=generated)


def test_tokens_are_right_at_the_stated_rate_and_the_model_runs_for_its_cost() -> None:
    model = Model()
    drafter = SyntheticDrafter(model, KNOWN, 0.7, 5000, 0)
    (draft,) = drafter.draft([sequence(0, 0)], [2000])
    assert draft.drafter == "synthetic"
    right = sum(a == b for a, b in zip(draft.tokens, KNOWN[0], strict=True))
    assert right / 2000 == pytest.approx(0.7, abs=0.03)
    assert model.lengths == [[2000]]


def test_errors_depend_on_request_and_position_alone() -> None:
    drafter = SyntheticDrafter(Model(), KNOWN, 0.5, 5000, 0)
    (whole,) = drafter.draft([sequence(1, 0)], [100])
    others = drafter.draft([sequence(0, 3), sequence(1, 40)], [5, 60])
    assert others[1].tokens == whole.tokens[40:]
    assert SyntheticDrafter(Model(), KNOWN, 0.5, 5000, 1).draft([sequence(1, 0)], [100])[0].tokens != whole.tokens


def test_drafts_end_with_the_continuation() -> None:
    drafter = SyntheticDrafter(Model(), KNOWN, 0.5, 5000, 0)
    assert len(drafter.draft([sequence(0, 1998)], [8])[0].tokens) == 2


def cost(fixed: float, each: float) -> PassCost:
    found = PassCost()
    for rows in (1, 8, 32):
        for _ in range(4):
            found.update(rows, fixed + each * rows)
    return found


def test_the_best_length_grows_with_acceptance_and_shrinks_with_cost() -> None:
    target, cheap, slow = cost(10.0, 0.1), cost(0.1, 0.0), cost(20.0, 0.0)
    assert best_draft_tokens(0.9, 4, target, cheap) == 8
    assert best_draft_tokens(0.3, 4, target, cheap) < 4
    assert best_draft_tokens(0.9, 4, target, slow) == 1
