"""The interface between the engine and its drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from detgen.kernels.penalties import Growing
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
    def structure(self) -> object | None:
        """The form that its text must have, the same object for all texts of a form; None for any text."""
        ...

    @property
    def remaining(self) -> int:
        """How many more tokens it may generate."""
        ...

    @property
    def generated(self) -> int:
        """How many of the tokens are of its completion."""
        ...

    def forced(self, most: int) -> list[int]:
        """The next tokens that are the only ones that may come, at most so many."""
        ...

    def growing(self) -> Growing | None:
        """How its next tokens are adjusted, where its text may be any; None if they are not."""
        ...

    def choice(self, ahead: int = 0, draft: list[int] | tuple[int, ...] = ()) -> Choice:
        """How the token `ahead` positions after the next one is chosen, the first `ahead` of `draft` coming before."""
        ...


class Draft(NamedTuple):
    """Draft tokens of one sequence, and the name of the drafter that proposed them."""

    tokens: list[int]
    drafter: str


class Drafter(ABC):
    """Proposes tokens after the committed ones. Only `name` and `draft` have to be there.

    Attributes:
        name: its name on the command line, and in the acceptance log unless a draft names another.
        draft_tokens: most tokens that it drafts per sequence and round; None for what the user set, or else four.
        while_reading: whether it is asked in rounds that read prompts, too. What such a round took says nothing of the
            drafts, so a drafter that learns from `timed` should stay out of them.
        forces: whether it is asked even if it is idle where the text of some sequence must have a form.
    """

    name: str
    draft_tokens: int | None = None
    while_reading = True
    forces = False

    @abstractmethod
    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]."""

    def idle(self) -> bool:
        """Whether it drafts nothing in the next round: it is not asked then, and sequences may get a few tokens."""
        return False

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Called after each verified draft.

        Args:
            seq: whose draft it was.
            drafter: the name that the draft had.
            accepted: how many of its tokens were.
            tried: how many were compared with a canonical choice.
        """
        return

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """Called after each round that read no prompt, unless nothing was drafted in it and a sequence ended.

        Args:
            steps: tokens that it committed, of each sequence on average; of a round without drafts, about its passes.
            seconds: its time.
            sequences: how many there were to draft for; 0 where others drafted too, so that its time is no measure.
        """
        return
