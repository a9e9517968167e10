"""How much a round attempts: how many tokens are drafted, and how many passes one call makes.

None of it reaches an output; every decision here is a matter of speed alone. Knows no tensors.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from detgen.drafters.protocol import Drafter
from detgen.engine.running_batch import RunningBatch
from detgen.kernels.decoder import Chaining
from detgen.kernels.input_batch import MOST_ROWS, Windows
from detgen.kernels.pass_cost import PassCost

# Passes in one call, where there is no drafting; more gain little, and a slot waits for them when its sample ends. A
# sequence that is alone delays no other, so there are more of them as long as they are over soon.
CHAINED, ALONE = 4, 16
_SOON = 0.01  # seconds
_LOGITS = 1 << 25  # most entries of logits that one call leaves behind


class Passes(Protocol):
    """What is known of passes of the target."""

    @property
    def cost(self) -> PassCost:
        """What they take."""
        ...

    @property
    def most_drafted(self) -> int:
        """The most draft tokens of a window, which is verified in one pass."""
        ...

    @property
    def rewinds(self) -> bool:
        """Whether rows of any number of passes may turn out not to stand."""
        ...

    @property
    def chaining(self) -> Chaining | None:
        """Makes one call of several, in which each reads what the one before chose; None where that cannot be."""
        ...


class Policy:
    """Decides about rounds, from the live sequences.

    Args:
        drafter: who drafts.
        draft_tokens: most tokens that it drafts per sequence and round.
        passes: those of the target.
    """

    def __init__(self, drafter: Drafter, draft_tokens: int, passes: Passes) -> None:
        self._drafter = drafter
        self._draft_tokens = min(draft_tokens, passes.most_drafted)
        self._passes = passes

    def draft_tokens(self, live: RunningBatch) -> int:
        """Most draft tokens per sequence in the next round; 0 where the drafter is not asked."""
        left_out = not self._drafter.while_reading and bool(len(live.still_reading()))
        return 0 if left_out or self.undrafted(live) else self._draft_tokens

    def chain_length(self, live: RunningBatch) -> int:
        """Most passes that one call may make in the next round."""
        if len(live) > 1 or (live.watched | live.reading)[live.busy].any():
            return CHAINED
        return int(min(max(_SOON / max(self._passes.cost.predict(1), 1e-9), CHAINED), ALONE))

    def may_chain(self, live: RunningBatch, windows: Windows) -> bool:
        """Whether a call may make several passes of these windows and, where a call may read, of chunks of prompts.

        They have no drafts. A drafter that is not idle may find something after the next token, so each pass is a call
        then. Where decoding leaves few rows to chunks, a round has more passes than one.
        """
        chaining = self._passes.chaining
        if chaining is None or not len(live) or len(windows.tokens) > len(windows):
            return False
        if len(windows) == len(live):
            return len(live) <= MOST_ROWS and self.undrafted(live)
        return chaining.reads and 3 * len(live) <= 2 * MOST_ROWS and not self.draft_tokens(live)

    def may_foresee(self, live: RunningBatch, slots: np.ndarray, most: int) -> bool:
        """Whether what sampled rows of so many passes choose can be foreseen, and there is room for their logits."""
        chaining = self._passes.chaining
        assert chaining is not None, "it may chain"
        kept = chaining.kept
        if not kept:  # what is chosen stands, and penalties count it
            return not live.formed[slots].any()
        return self._passes.rewinds and not live.adjusted[slots].any() and len(slots) * most * kept <= _LOGITS

    def undrafted(self, live: RunningBatch) -> bool:
        """Whether there is no drafter, or nothing to draft for: unverified requests are never drafted for."""
        asked = live.busy & live.verified
        return not asked.any() or (self._drafter.idle() and not (self._drafter.forces and live.formed[asked].any()))
