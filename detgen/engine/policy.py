"""Decides how much a round attempts: how many tokens to draft, and how many passes to run in one call.

No decision here affects an output, only speed. Knows no tensors.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from detgen.drafters.protocol import Drafter
from detgen.engine.running_batch import RunningBatch
from detgen.kernels.decoder import Chaining
from detgen.kernels.input_batch import MOST_ROWS, Windows
from detgen.kernels.pass_cost import PassCost
from detgen.kernels.rounds import Rounding

# Most passes in one call without drafts, by default and for a single sequence. More would gain little, and a slot whose
# sample has ended waits for them. A single sequence delays no other, so it gets more if they take at most `_SOON`.
CHAINED, ALONE = 4, 16
_SOON = 0.01  # seconds
_LOGITS = 1 << 25  # most logits that one call may keep


class Passes(Protocol):
    """Properties of the target's passes."""

    @property
    def cost(self) -> PassCost:
        """Their cost."""
        ...

    @property
    def most_drafted(self) -> int:
        """The maximum number of draft tokens of a window, which is verified in one pass."""
        ...

    @property
    def rewinds(self) -> bool:
        """Whether rows of any number of passes can be rolled back."""
        ...

    @property
    def rounding(self) -> Rounding | None:
        """Runs several rounds in one call; None if that is impossible."""
        ...

    @property
    def chaining(self) -> Chaining | None:
        """Runs several passes in one call, each reading what the one before chose; None if that is impossible."""
        ...


class Policy:
    """Makes the decisions for a round from the live sequences.

    Args:
        drafter: the drafter.
        draft_tokens: maximum number of tokens that it drafts per sequence and round.
        passes: the target's passes.
    """

    def __init__(self, drafter: Drafter, draft_tokens: int, passes: Passes) -> None:
        self._drafter = drafter
        self._draft_tokens = min(draft_tokens, passes.most_drafted)
        self._passes = passes

    def draft_tokens(self, live: RunningBatch) -> int:
        """Return the maximum number of draft tokens per sequence in the next round; 0 if the drafter is not asked."""
        left_out = not self._drafter.while_reading and bool(len(live.still_reading()))
        return 0 if left_out or self.undrafted(live) else self._draft_tokens

    def chain_length(self, live: RunningBatch) -> int:
        """Return the maximum number of passes per call in the next round."""
        if len(live) > 1 or (live.watched | live.reading)[live.busy].any():
            return CHAINED
        return int(min(max(_SOON / max(self._passes.cost.predict(1), 1e-9), CHAINED), ALONE))

    def rounds(self, live: RunningBatch) -> int:
        """Return the maximum number of rounds that one call drafts and verifies; 0 if each is made of calls of its own.

        Forms are left to rounds that the host sees by themselves.
        """
        may = self._drafter.plans and self._passes.rounding is not None and not (live.formed & live.busy).any()
        return CHAINED if may and self.draft_tokens(live) else 0

    def may_chain(self, live: RunningBatch, windows: Windows) -> bool:
        """Return whether a call may run several passes of these windows and, if calls may read, of chunks of prompts.

        The windows have no drafts. A drafter that is not idle may find a draft after the next token, so each pass is a
        call of its own then.
        """
        chaining = self._passes.chaining
        if chaining is None or not 0 < len(live) <= MOST_ROWS or len(windows.tokens) > len(windows):
            return False
        if len(windows) == len(live):
            return self.undrafted(live)
        return chaining.reads and not self.draft_tokens(live)

    def may_foresee(self, live: RunningBatch, slots: np.ndarray, most: int) -> bool:
        """Return whether the choices of sampled rows can be foreseen for that many passes, and their logits fit."""
        chaining = self._passes.chaining
        assert chaining is not None, "it may chain"
        kept = chaining.kept
        if not kept:  # the choices are final, and penalties count them
            return not live.formed[slots].any()
        return self._passes.rewinds and not live.adjusted[slots].any() and len(slots) * most * kept <= _LOGITS

    def undrafted(self, live: RunningBatch) -> bool:
        """Return whether there is no drafter, or nothing to draft for: unverified requests get no drafts."""
        asked = live.busy & live.verified
        return not asked.any() or (self._drafter.idle() and not (self._drafter.forces and live.formed[asked].any()))
