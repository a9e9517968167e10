"""The interface between the engine and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from detgen.kernels.sampling import Choice


class Drafting(Protocol):
    """A sequence as a drafter sees it.

    Attributes:
        tokens: prompt and committed tokens.
        slot: its slot.
        acceptance: running (accepted, tried) draft tokens by drafter.
        ending: token ids after which nothing need be drafted.
    """

    tokens: list[int]
    slot: int
    acceptance: dict[str, tuple[float, float]]
    ending: frozenset[int]

    @property
    def remaining(self) -> int:
        """How many more tokens it may generate."""
        ...

    @property
    def generated(self) -> int:
        """How many of the tokens are of its completion."""
        ...

    def choice(self, ahead: int = 0, draft: list[int] | tuple[int, ...] = ()) -> Choice:
        """How the token `ahead` positions after the next one is chosen, the first `ahead` of `draft` coming before."""
        ...


class Draft(NamedTuple):
    """Draft tokens of one sequence, and the name of the drafter that proposed them."""

    tokens: list[int]
    drafter: str


class Drafter(Protocol):
    """Proposes tokens after the committed ones.

    A drafter may also have `draft_tokens`, the most tokens it drafts per sequence and round; `learn(seq, drafter,
    accepted, tried)`, which is called after each verified draft with the numbers of tokens that were accepted and that
    were compared with a canonical choice; `patient`, whether it drafts nothing in the next round: it is not asked then,
    and sequences may get a few tokens; and `timed(tokens, seconds, sequences, waiting)`, which is told of rounds in
    which all sequences decode: the committed tokens, the time, the number of sequences, and whether requests wait. A
    drafter that has it is asked in such rounds only. Rounds without drafts in which a sequence ends are not told.
    """

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]."""
        ...
