"""The interface between the engine and its drafters."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from detgen.kernels.penalties import Growing
from detgen.kernels.sampling import Choice

if TYPE_CHECKING:
    from detgen.kernels.input_batch import Window
    from detgen.runner.model_runner import ModelRunner


class Drafting(Protocol):
    """A sequence as a drafter sees it.

    Attributes:
        tokens: prompt and committed tokens.
        slot: its slot.
        acceptance: running (accepted, tried) draft tokens by drafter.
        ending: token ids after which drafting is pointless.
    """

    tokens: list[int]
    slot: int
    acceptance: dict[str, tuple[float, float]]
    ending: frozenset[int]

    @property
    def structure(self) -> object | None:
        """The form of its text, the same object for all texts of a form; None for any text."""
        ...

    @property
    def remaining(self) -> int:
        """The number of tokens that it may still generate."""
        ...

    @property
    def generated(self) -> int:
        """The number of tokens that belong to its completion."""
        ...

    def forced(self, most: int) -> list[int]:
        """Return the next tokens that the form forces, at most `most`."""
        ...

    def growing(self) -> Growing | None:
        """Return how its next tokens are adjusted, for text without a form; None if they are not."""
        ...

    def choice(self, ahead: int = 0, draft: list[int] | tuple[int, ...] = ()) -> Choice:
        """Return how the token `ahead` positions after the next one is chosen, given `ahead` tokens of `draft`."""
        ...


class Draft(NamedTuple):
    """Draft tokens of one sequence, and the name of the drafter that proposed them."""

    tokens: list[int]
    drafter: str


class DraftPlan(NamedTuple):
    """How a device drafts for sequences in the rounds of a call, before the host has seen what the first one committed.

    Attributes:
        drafter: the name of the drafter.
        nothing: the name of the drafter of empty drafts.
        counts: most tokens that each sequence drafts in a round.
        wrote: called with a sequence and its draft, before what a round committed of it is appended.
        runner: runs the passes that draft; None if there are none, since drafts are looked up as `NgramDrafter` does.
        reads: what the model reads first, of each sequence that drafts.
        again: how many of its last tokens it reads of each in later rounds.
        context: most positions of a sequence in these passes.
        rounds: most rounds to draft so; None for any number.
    """

    drafter: str
    nothing: str
    counts: list[int]
    wrote: Callable[[Drafting, list[int]], None]
    runner: ModelRunner | None = None
    reads: Sequence[Window] = ()
    again: int = 1
    context: int = sys.maxsize
    rounds: int | None = None


class Drafter(ABC):
    """Proposes tokens after the committed ones. Only `name` and `draft` must be defined.

    Attributes:
        name: its name on the command line, and in the acceptance log unless a draft names another.
        draft_tokens: maximum number of tokens to draft per sequence and round; None for the user's setting, or four.
        while_reading: whether it also drafts in rounds that read prompts. The time of such a round says nothing about
            the drafts, so a drafter that learns from `timed` should not take part.
        forces: whether it is asked even if it is idle where the text of some sequence must have a form.
        plans: whether `plan` may return how a device drafts.
    """

    name: str
    draft_tokens: int | None = None
    while_reading = True
    forces = False
    plans = False

    @abstractmethod
    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i]."""

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """Draft as `draft` does, or return how a device may; no text has a form then.

        Asked instead of `draft` where one call can run several rounds.
        """
        return self.draft(seqs, lengths)

    def idle(self) -> bool:
        """Return whether it drafts nothing in the next round, in which one call may then run several passes."""
        return False

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Learn from a verified draft.

        Args:
            seq: the sequence.
            drafter: name of the drafter, as in the draft.
            accepted: number of accepted tokens.
            tried: number of tokens that were compared with a canonical choice.
        """
        return

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """Learn from a round that read no prompt. Not called if nothing was drafted and a sequence ended.

        Args:
            steps: committed tokens per sequence, on average; without drafts, about the number of passes.
            seconds: duration of the round.
            sequences: number of sequences to draft for; 0 if others drafted too, so that the time is no measure.
        """
        return
