"""No drafts: each pass gives each sequence one token. This is the reference for all other drafters."""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts


class NoDrafter(Drafter):
    """Drafts nothing."""

    name = "none"

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Return empty drafts."""
        return [Draft([], self.name) for _ in seqs]

    def idle(self) -> bool:
        """Return True."""
        return True


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NoDrafter()
