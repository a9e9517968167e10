"""No drafts: each pass gives each sequence one token. All others are compared with this reference."""

from __future__ import annotations

from collections.abc import Sequence

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts


class NoDrafter(Drafter):
    """Drafts nothing."""

    name = "none"

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """No tokens."""
        return [Draft([], self.name) for _ in seqs]

    def idle(self) -> bool:
        """Always."""
        return True


def make(_: Parts) -> Drafter:
    """Make the drafter."""
    return NoDrafter()
