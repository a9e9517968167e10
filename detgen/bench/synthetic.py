"""A drafter that is right at a stated rate: the canonical continuation with errors put in.

Random weights give no draft model a chance, so what drafts of a given acceptance are worth is measured with this one.
It costs what a draft model costs: the real one runs for every draft, and its tokens are thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.passes.cost import PassCost

if TYPE_CHECKING:
    from detgen.engine.sequence import Sequence as EngineSequence

DRAFT_TOKENS = range(1, 9)


class SyntheticDrafter:
    """Proposes known tokens, each one wrong with probability 1 - acceptance.

    Whether a token is wrong depends on its request and position alone, so all batch sizes see the same errors.

    Args:
        model: the draft model's drafter, run for its cost.
        continuations: by the request's index, what the target generates.
        acceptance: probability that a drafted token is right.
        vocabulary: entries of the target's logits.
        seed: of the errors.
    """

    name = "synthetic"

    def __init__(
        self, model: Drafter, continuations: Sequence[Sequence[int]], acceptance: float, vocabulary: int, seed: int
    ) -> None:
        self._model = model
        self._continuations = continuations
        self._acceptance = acceptance
        self._vocabulary = vocabulary
        self._seed = seed

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]."""
        self._model.draft(seqs, lengths)
        return [
            Draft(self._proposal(cast("EngineSequence", s), n), self.name) for s, n in zip(seqs, lengths, strict=True)
        ]

    def _proposal(self, seq: EngineSequence, length: int) -> list[int]:
        index, at = seq.request.index, seq.generated
        known = self._continuations[index][at : at + length]
        return [
            token if random.Random(f"error {self._seed} {index} {at + i}").random() < self._acceptance
            else (token + 1) % self._vocabulary
            for i, token in enumerate(known)
        ]  # fmt: skip


def best_draft_tokens(acceptance: float, batch_size: int, target: PassCost, draft: PassCost) -> int:
    """The draft length of the most expected tokens a second, from the measured costs of both models' passes."""

    def speed(length: int) -> float:
        expected = sum(acceptance**i for i in range(length + 1))
        seconds = target.predict(batch_size * (length + 1)) + length * draft.predict(batch_size)
        return expected / seconds if seconds else expected

    return max(DRAFT_TOKENS, key=speed)
