"""A model that can be predicted, in place of a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.pass_cost import PassCost
from detgen.kernels.sampling import Choice
from detgen.runner.block_manager import PAGE, BlockManager

VOCABULARY = 50


def follow(tokens: list[int]) -> int:
    """The token that the predictable model gives most weight behind these: it depends on every one of them."""
    value = 17
    for t in tokens:
        value = (value * 31 + t + 1) % 1_000_003
    return value % VOCABULARY


class PredictablePasses:
    """Passes that remember which token stands at which position of the cache, page by page.

    Logits depend on all tokens that a row would attend to, so anything stale, missing or misplaced shows.

    Args:
        chains: whether several passes are run in one call.
    """

    def __init__(self, chains: bool) -> None:
        self.rewinds = True
        self.chaining = SimpleNamespace(outputs=VOCABULARY, kept=VOCABULARY) if chains else None
        self.pages = BlockManager(400)
        for slot in range(16):
            self.pages.take(slot, 0)
        self.entries: dict[int, int] = {}
        self.cost = PassCost()
        self.passes: list[list[Window]] = []
        self.cache = SimpleNamespace(pages=self.pages)

    def reach(self, slot: int, positions: int) -> None:
        """Give a slot pages for so many positions."""
        self.pages.grow(slot, -(-positions // PAGE))

    def place(self, slot: int, position: int) -> int:
        """Where a position of a slot is."""
        return int(self.pages.tables[slot, position // PAGE]) * PAGE + position % PAGE

    def read(self, slot: int, tokens: list[int]) -> None:
        """Let a slot hold these tokens."""
        self.reach(slot, len(tokens))
        self.entries.update({self.place(slot, i): t for i, t in enumerate(tokens)})

    def share(self, source: int, target: int, tokens: list[int], cached: int) -> None:
        """Give slot `target` the first `cached` positions of slot `source`, as the scheduler does."""
        keys = self.pages.keys(tokens)
        self.pages.fill(source, tokens, cached, keys)
        self.pages.release(target)
        prefix = self.pages.find(tokens, keys)
        assert prefix.shared == min(cached, len(tokens) - 1)
        copied = self.pages.take(target, -(-len(tokens) // PAGE), prefix, tokens, keys)
        if copied is not None:
            origin, to, count = copied
            held = self.entries
            held.update({to * PAGE + i: held[origin * PAGE + i] for i in range(count) if origin * PAGE + i in held})

    def run(self, windows: Iterable[Window], broken: list[int] | None = None) -> np.ndarray:
        windows = list(windows)
        self.passes.append(windows)
        assert len({w.slot for w in windows}) == len(windows), "at most one window a slot"
        rows = []
        for w in windows:
            self.reach(w.slot, w.start + len(w.tokens))
            self.entries.update({self.place(w.slot, w.start + i): t for i, t in enumerate(w.tokens)})
            for end in range(w.start + len(w.tokens) - w.logits, w.start + len(w.tokens)):
                row = np.zeros(VOCABULARY + 3, np.float32)
                row[follow([self.entries[self.place(w.slot, i)] for i in range(end + 1)])] = 9.0
                rows.append(row)
        return np.stack(rows) if rows else np.zeros((0, VOCABULARY + 3), np.float32)

    def chain(self, windows: Windows, lengths: np.ndarray) -> tuple[np.ndarray, Scores, list[int]]:
        going, read, chosen = list(windows), [[w.tokens[-1]] for w in windows], [[] for _ in windows]
        for step in range(int(lengths.max())):
            there = (lengths > step).nonzero()[0].tolist()
            logits = self.run([going[i] for i in there])
            for i, token in zip(there, logits.argmax(-1).tolist(), strict=True):
                going[i] = Window(going[i].slot, going[i].start + len(going[i].tokens), [token], 1)
                chosen[i].append(token)
                read[i].append(token)
        tokens = np.concatenate(chosen)
        ones = np.ones(len(tokens))
        return np.concatenate([r[:-1] for r in read]), Scores(tokens, ones, ones, ones.astype(bool)), []


@dataclass(eq=False)
class Draftable:
    """A sequence as drafters see it."""

    slot: int
    tokens: list[int]
    acceptance: dict[str, tuple[float, float]] = field(default_factory=dict)
    ending: frozenset[int] = frozenset()
    structure: object | None = None
    generated: int = 0
    remaining: int = 10_000

    def choice(self, ahead: int = 0, draft: Any = ()) -> Choice:
        return Choice()

    def growing(self) -> None:
        return None

    must: list[int] = field(default_factory=list)

    def forced(self, most: int) -> list[int]:
        return self.must[:most]

    def wanted(self, length: int) -> list[int]:
        """What the predictable model writes behind the tokens."""
        found: list[int] = []
        for _ in range(length):
            found.append(follow(self.tokens + found))
        return found


@pytest.fixture(params=[False, True], ids=["stepwise", "at once"])
def predictable(request: pytest.FixtureRequest) -> PredictablePasses:
    return PredictablePasses(chains=request.param)


@pytest.fixture(scope="session")
def draftable() -> Callable[..., Any]:
    """Makes sequences: `draftable(slot, tokens)`."""
    return Draftable
