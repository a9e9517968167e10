"""What a drafter is, and what it sees of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from detgen.kernels.sampling import Choice


class Drafting(Protocol):
    """A sequence as a drafter sees it: prompt and committed tokens, in a slot."""

    tokens: list[int]
    slot: int
    acceptance: dict[str, tuple[float, float]]

    def choice(self, ahead: int = 0) -> Choice:
        """How the token `ahead` places behind the next one is chosen."""
        ...


class Draft(NamedTuple):
    """Provisional tokens of one sequence, and the name of the drafter that wrote them."""

    tokens: list[int]
    drafter: str


class Drafter(Protocol):
    """Writes provisional tokens after the committed ones.

    It may also have `draft_tokens`, the most tokens that it drafts a round, and `learn(seq, drafter, accepted, tried)`,
    which is told how each of its drafts fared: how many tokens were accepted, and how many were compared with a
    canonical choice.
    """

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]."""
        ...
