"""The target drafts for itself, by its own weights in fewer bits on its own KV cache.

This is the fast path of LLM-42 (arXiv 2601.17768): a draft writes provisional entries after the committed ones, and
the pass that verifies it overwrites them. Nothing is read twice, and rolling back is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.auto import AutoDrafter
from detgen.drafters.passes import PassDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.kernels.decoder import Narrowed
from detgen.kernels.input_batch import Window
from detgen.kernels.pass_cost import PassCost
from detgen.runner.model_runner import ModelRunner

# Passes by copies in 8 bits take a third longer than those in 4. With 96 of 100 tokens accepted, as is usual, a round
# by them is worth more as soon as fewer than 90 of 100 are in 4.
_WORTH = 0.9
_ENOUGH = 100  # tokens, before that can be told


class SelfDrafter(PassDrafter):
    """Drafts with the target's narrowed weights, which are made when something is drafted first.

    Args:
        runner: passes by these weights.
        narrowed: the weights.
        target_cost: cost of the target's passes.
        vocabulary: see `PassDrafter`.
        context: most positions of the target.
    """

    name = "self"

    def __init__(
        self,
        runner: ModelRunner,
        narrowed: Narrowed,
        target_cost: PassCost,
        vocabulary: int,
        context: int,
    ) -> None:
        super().__init__(runner, vocabulary, context)
        self._narrowed, self._target_cost = narrowed, target_cost
        self._made, self._accepted, self._tried = False, 0, 0

    @property
    def ready(self) -> bool:
        """Whether the weights are there."""
        return self._made

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """See `PassDrafter`; the first draft makes the weights."""
        if self.ready or not any(lengths):
            return super().draft(seqs, lengths)
        self._made = True
        drafts = super().draft(seqs, lengths)
        self.runner.cost = PassCost()  # of passes that were not the first
        return drafts

    def seconds(self, rows: float, chosen: float) -> float:
        """As `PassDrafter.seconds`; up to the second draft, as the bytes that passes read say."""
        return super().seconds(rows, chosen) or self._narrowed.share * self._target_cost.predict(rows, chosen=chosen)

    def changed_by(self, accepted: int, tried: int) -> bool:
        """See `PassDrafter`: where fewer drafts are accepted than are worth it, better copies take their place."""
        self._accepted, self._tried = self._accepted + accepted, self._tried + tried
        if self._tried < _ENOUGH or self._accepted >= _WORTH * self._tried:
            return False
        self._accepted, self._tried = 0, 0
        if not self._narrowed.improve():
            return False
        self._made = False
        return True

    def unread(self, seq: Drafting) -> int:
        """The last committed token: the target's cache holds all before it."""
        return 1

    def _reads(self, seq: Drafting) -> Window:
        return Window(seq.slot, len(seq.tokens) - 1, seq.tokens[-1:], 1, drafted=1)  # its entries are provisional

    def _wrote(self, window: Window, draft: list[int]) -> None:
        """What was written is provisional: nothing is to be known of it."""


def make(parts: Parts) -> Drafter:
    """Drafts by the engine's only one, since its weights take memory; how many tokens, `auto`'s rule says."""
    assert parts.own is not None
    return AutoDrafter(parts, SelfDrafter.name)
