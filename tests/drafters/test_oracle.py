from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from detgen.drafters.oracle import Known, OracleDrafter, SyntheticDrafter
from detgen.drafters.protocol import Draft
from detgen.kernels.sampling import Choice

TEXTS = [tuple(range(100, 2100)), tuple(range(2000))]
ORACLE = OracleDrafter(Known(Choice(), text) for text in TEXTS)


class Model:
    name = "model"

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def draft(self, seqs: Sequence[Any], lengths: list[int]) -> list[Draft]:
        self.lengths.append(lengths)
        return [Draft([0] * n, "model") for n in lengths]


@dataclass(eq=False)
class Sample:
    tokens: list[int]
    slot: int = 0
    acceptance: dict[str, tuple[float, float]] = field(default_factory=dict)
    ending: frozenset[int] = frozenset()
    structure: object | None = None

    def growing(self) -> None:
        return None

    def choice(self, ahead: int = 0, draft: Any = ()) -> Choice:
        return Choice()


def at(text: int, position: int) -> Sample:
    return Sample(list(TEXTS[text][:position]))


def synthetic(acceptance: float, seed: int = 0) -> SyntheticDrafter:
    return SyntheticDrafter(Model(), ORACLE, acceptance, 5000, seed)


def test_the_oracle_is_right_as_far_as_it_knows() -> None:
    first, last, unknown = ORACLE.draft([at(0, 1), at(1, 1998), Sample([7, 7])], [3, 5, 4])
    assert (first.tokens, last.tokens, unknown.tokens) == ([101, 102, 103], [1998, 1999], [])


def test_tokens_are_right_at_the_stated_rate_and_the_model_runs_for_its_cost() -> None:
    model = Model()
    (draft,) = SyntheticDrafter(model, ORACLE, 0.7, 5000, 0).draft([at(0, 1)], [1999])
    assert draft.drafter == "synthetic"
    right = sum(a == b for a, b in zip(draft.tokens, TEXTS[0][1:], strict=True))
    assert right / 1999 == pytest.approx(0.7, abs=0.03)
    assert model.lengths == [[1999]]


def test_errors_depend_on_text_and_position_alone() -> None:
    (whole,) = synthetic(0.5).draft([at(1, 3)], [100])
    others = synthetic(0.5).draft([at(0, 3), at(1, 43)], [5, 60])
    assert others[1].tokens == whole.tokens[40:]
    assert synthetic(0.5, seed=1).draft([at(1, 3)], [100])[0].tokens != whole.tokens


def test_drafts_end_with_the_text() -> None:
    sample = at(0, 1990)
    drafter = synthetic(0.5)
    assert len(drafter.draft([sample], [4])[0].tokens) == 4
    sample.tokens += TEXTS[0][1990:1998]
    assert len(drafter.draft([sample], [8])[0].tokens) == 2
