"""Drafts what the form of a text forces, the tokens that are the only ones that may come, in front of another drafter.

The target's pass reads and verifies them as any draft. None is ever wrong, so there is nothing to weigh: where a form
forces something, the other drafter is not asked, and what the round took says nothing of its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.none import NoDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts


class GrammarDrafter(Drafter):
    """Drafts for sequences whose text must have a form; for others, and where several tokens may come, another does.

    Args:
        other: the other drafter.
        name: its own name.
    """

    forces = True

    def __init__(self, other: Drafter, name: str) -> None:
        self.name, self._other = name, other
        self.draft_tokens, self.while_reading = other.draft_tokens, other.while_reading
        self._forced = False  # whether something was forced in this round

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; "grammar" has drafted those that are forced."""
        forced = [seq.forced(n) for seq, n in zip(seqs, lengths, strict=True)]
        self._forced = any(forced)
        if not self._forced:
            return self._other.draft(seqs, lengths)
        drafts = self._other.draft(seqs, [0 if own else n for own, n in zip(forced, lengths, strict=True)])
        return [Draft(own, "grammar") if own else draft for own, draft in zip(forced, drafts, strict=True)]

    def idle(self) -> bool:
        """Where no form forces anything, as the other."""
        return self._other.idle()

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """What was forced teaches nothing."""
        if drafter != "grammar":
            self._other.learn(seq, drafter, accepted, tried)

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """A round with forced tokens is no measure of the other's drafts."""
        self._other.timed(steps, seconds, 0 if self._forced else sequences)
        self._forced = False


def make(_: Parts) -> Drafter:
    """It alone."""
    return GrammarDrafter(NoDrafter(), "grammar")
