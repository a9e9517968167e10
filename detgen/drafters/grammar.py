"""Drafts the tokens that a form forces, because no others may come, and leaves the rest to another drafter.

The target's pass reads and verifies them like any draft. They are never wrong, so nothing has to be weighed: where a
form forces tokens, the other drafter is not asked, and the time of the round says nothing about its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.none import NoDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting, DraftPlan
from detgen.drafters.registry import Parts


class GrammarDrafter(Drafter):
    """Drafts forced tokens for sequences with a form; another drafter handles everything else.

    Args:
        other: the other drafter.
        name: its own name.
    """

    forces = True

    def __init__(self, other: Drafter, name: str) -> None:
        self.name, self._other = name, other
        self.draft_tokens, self.while_reading = other.draft_tokens, other.while_reading
        self.plans = other.plans
        self._forced = False  # whether something was forced in this round

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i]; the drafter of forced tokens is "grammar"."""
        forced = [seq.forced(n) for seq, n in zip(seqs, lengths, strict=True)]
        self._forced = any(forced)
        if not self._forced:
            return self._other.draft(seqs, lengths)
        drafts = self._other.draft(seqs, [0 if own else n for own, n in zip(forced, lengths, strict=True)])
        return [Draft(own, "grammar") if own else draft for own, draft in zip(forced, drafts, strict=True)]

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """Let the other drafter plan: where plans are asked for, no text has a form."""
        return self._other.plan(seqs, lengths)

    def idle(self) -> bool:
        """Return whether the other drafter is idle."""
        return self._other.idle()

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Pass on what was learned, except about forced tokens."""
        if drafter != "grammar":
            self._other.learn(seq, drafter, accepted, tried)

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """Pass on the time; a round with forced tokens is no measure of the other's drafts."""
        self._other.timed(steps, seconds, 0 if self._forced else sequences)
        self._forced = False


def make(_: Parts) -> Drafter:
    """Make a drafter of forced tokens alone."""
    return GrammarDrafter(NoDrafter(), "grammar")
