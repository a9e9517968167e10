"""The target drafts for itself, with its own weights in fewer bits, on its own KV cache.

This is the fast path of LLM-42 (arXiv 2601.17768): a draft writes provisional entries after the committed ones, and the
pass that verifies it overwrites them. Nothing is read twice, and the target's roll-back covers the drafter, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.auto import AutoDrafter
from detgen.drafters.passes import PassDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting, DraftPlan
from detgen.drafters.registry import Parts
from detgen.kernels.decoder import Narrowed
from detgen.kernels.input_batch import Window
from detgen.kernels.pass_cost import PassCost
from detgen.runner.model_runner import ModelRunner

# A pass with a copy in 8 bits takes a third longer than with one in 4. Since the former usually has 96 of 100 tokens
# accepted, it is worth more as soon as fewer than 90 of 100 tokens of the latter are.
_WORTH = 0.9
_ENOUGH = 100  # tokens to judge by


class SelfDrafter(PassDrafter):
    """Drafts with the target's narrowed weights, which are made for the first draft.

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
        """Whether the weights have been made."""
        return self._made

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """See `PassDrafter`; the first draft makes the weights."""
        if self.ready or not any(lengths):
            return super().draft(seqs, lengths)
        self._made = True
        drafts = super().draft(seqs, lengths)
        self.runner.cost = PassCost()  # of passes that were not the first
        return drafts

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """See `Drafter.plan`; not before the weights have been made."""
        return super().plan(seqs, lengths) if self.ready else self.draft(seqs, lengths)

    def seconds(self, rows: float, chosen: float) -> float:
        """See `PassDrafter.seconds`; before the second draft, estimated from the bytes that a pass reads."""
        return super().seconds(rows, chosen) or self._narrowed.share * self._target_cost.predict(rows, chosen=chosen)

    def changed_by(self, accepted: int, tried: int) -> bool:
        """See `PassDrafter`; if too few drafts are accepted, a better copy of the weights takes over."""
        self._accepted, self._tried = self._accepted + accepted, self._tried + tried
        if self._tried < _ENOUGH or self._accepted >= _WORTH * self._tried:
            return False
        self._accepted, self._tried = 0, 0
        if not self._narrowed.improve():
            return False
        self._made = False
        return True

    def unread(self, seq: Drafting) -> int:
        """Return 1, for the last committed token: the target's cache holds everything before it."""
        return 1

    def _reads(self, seq: Drafting) -> Window:
        return Window(seq.slot, len(seq.tokens) - 1, seq.tokens[-1:], 1, drafted=1)  # its entries are provisional

    def _wrote(self, window: Window, draft: list[int]) -> None:
        """Do nothing: what was written is provisional."""


def make(parts: Parts) -> Drafter:
    """Make a drafter that uses the engine's only copy of the weights, with lengths by `auto`'s rule."""
    assert parts.own is not None
    return AutoDrafter(parts, SelfDrafter.name)
