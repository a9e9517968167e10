"""Drafts what the form of a text forces: the tokens that are the only ones that may come, where a request has a form.

The target's pass reads and verifies them as any draft. None is ever wrong, so there is nothing to weigh.
"""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts


class GrammarDrafter(Drafter):
    """Drafts for sequences whose text must have a form; nothing for others."""

    name = "grammar"
    forces = True

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; none where several may come."""
        return [Draft(seq.forced(n), self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def idle(self) -> bool:
        """Always, where no form forces anything."""
        return True


def make(_: Parts) -> Drafter:
    """One that needs nothing of the engine."""
    return GrammarDrafter()
