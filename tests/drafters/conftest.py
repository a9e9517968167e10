"""A model that can be predicted, in place of a real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detgen.kernels.sampling import Choice
from detgen.passes.cost import PassCost
from detgen.passes.packing import Shapes, Window

VOCABULARY = 50


def follow(tokens: list[int]) -> int:
    """The token that the predictable model gives most weight behind these: it depends on every one of them."""
    value = 17
    for t in tokens:
        value = (value * 31 + t + 1) % 1_000_003
    return value % VOCABULARY


class PredictablePasses:
    """Passes that remember, a slot, which token stands in the cache at which position.

    Logits depend on all tokens that a row would attend to, so anything stale, missing or misplaced shows.
    """

    def __init__(self) -> None:
        self.slots: dict[int, dict[int, int]] = {}
        self.cost = PassCost()
        self.passes: list[list[Window]] = []
        self.cache = SimpleNamespace(copy_prefix=self._copy_prefix)

    def _copy_prefix(self, source: int, target: int, length: int) -> None:
        held = self.slots.setdefault(source, {})
        self.slots.setdefault(target, {}).update({i: held[i] for i in range(length)})

    def run(self, windows: list[Window], shapes: Shapes, broken: list[int] | None = None) -> torch.Tensor:
        self.passes.append(list(windows))
        assert len({w.slot for w in windows}) == len(windows), "at most one window a slot"
        assert sum(len(w.tokens) for w in windows) <= shapes.most_rows
        rows = []
        for w in windows:
            held = self.slots.setdefault(w.slot, {})
            held.update({w.start + i: t for i, t in enumerate(w.tokens)})
            for end in range(w.start + len(w.tokens) - w.logits, w.start + len(w.tokens)):
                row = torch.zeros(VOCABULARY + 3)
                row[follow([held[i] for i in range(end + 1)])] = 9.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.zeros(0, VOCABULARY + 3)


@dataclass(eq=False)
class Draftable:
    """A sequence as drafters see it."""

    slot: int
    tokens: list[int]
    acceptance: dict[str, tuple[float, float]] = field(default_factory=dict)
    ending: frozenset[int] = frozenset()

    def choice(self, ahead: int = 0, draft: Any = ()) -> Choice:
        return Choice()

    def wanted(self, length: int) -> list[int]:
        """What the predictable model writes behind the tokens."""
        found: list[int] = []
        for _ in range(length):
            found.append(follow(self.tokens + found))
        return found


@pytest.fixture
def predictable() -> PredictablePasses:
    return PredictablePasses()


@pytest.fixture(scope="session")
def draftable() -> Callable[..., Any]:
    """Makes sequences: `draftable(slot, tokens)`."""
    return Draftable
