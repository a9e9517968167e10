"""Drafting by passes of a model, one token per pass, for all sequences together.

Tokens are chosen with the noise that the target will use (Gumbel coupling, arXiv 2408.07978), so they agree as often as
the two distributions allow.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from detgen.drafters.protocol import Draft, Drafter, Drafting, DraftPlan
from detgen.kernels.input_batch import MOST_ROWS, Window, Windows, fill_passes
from detgen.kernels.sampling import Choice, choose
from detgen.program.arrays import Array, stacked
from detgen.runner.model_runner import ModelRunner


class PassDrafter(Drafter):
    """Drafts by unconstrained passes: no output depends on their bits.

    Args:
        runner: the passes.
        vocabulary: entries of the target's logits.
        context: most positions of a sequence in these passes.

    Attributes:
        again: how many of its last tokens the model reads of a sequence that drafted in the round before.
    """

    plans = True
    again = 1

    def __init__(self, runner: ModelRunner, vocabulary: int, context: int) -> None:
        self.runner = runner
        self._vocabulary = vocabulary
        self._context = context

    @property
    def ready(self) -> bool:
        """Whether the next draft takes no longer than others."""
        return True

    def seconds(self, rows: float, chosen: float) -> float:
        """Return the seconds of a pass with that many rows, including choosing that many tokens."""
        return self.runner.cost.predict(rows, chosen=chosen)

    def changed_by(self, accepted: int, tried: int) -> bool:
        """Learn how many of the `tried` tokens of a draft were accepted.

        Returns:
            Whether the drafter uses other weights from now on, whose acceptance rate is unknown.
        """
        return False

    @abstractmethod
    def unread(self, seq: Drafting) -> int:
        """Return about how many of the sequence's tokens the model must read before it can draft."""

    @abstractmethod
    def _reads(self, seq: Drafting) -> Window:
        """Return the tokens to read before the first draft token, including the last committed one."""

    @abstractmethod
    def _wrote(self, window: Window, draft: list[int]) -> None:
        """Note that the KV cache holds this window and the draft after it."""

    def room(self, seq: Drafting) -> int:
        """Return how many tokens fit the context; 0 or less for none."""
        return self._context - len(seq.tokens)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i]; stop after a token that ends it, and where the context ends."""
        lengths = [min(n, self.room(s)) for s, n in zip(seqs, lengths, strict=True)]
        drafts: list[list[int]] = [[] for _ in seqs]
        going = [i for i, n in enumerate(lengths) if n > 0]
        if going:
            some, limits = [seqs[i] for i in going], [lengths[i] for i in going]
            reads = [self._reads(seq) for seq in some]
            choices = [seq.choice() for seq in some]
            if self._foreseeable(some, reads, choices):
                found = self._at_once(some, limits, reads, choices)
            else:
                found = self._stepwise(some, limits, reads)
            for i, draft in zip(going, found, strict=True):
                drafts[i] = draft
        return [Draft(draft, self.name) for draft in drafts]

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """See `Drafter.plan`."""
        counts = [max(min(n, self.room(s)), 0) for s, n in zip(seqs, lengths, strict=True)]
        reads = [self._reads(seq) for seq, n in zip(seqs, counts, strict=True) if n]
        rounding, rows = self.runner.rounding, sum(len(read.tokens) for read in reads)
        if rounding is None or rounding.outputs != self._vocabulary or not 0 < rows <= MOST_ROWS:
            return self.draft(seqs, lengths)
        return DraftPlan(
            *(self.name, self.name, counts, self._drafted), *(self.runner, reads, self.again, self._context)
        )

    def _drafted(self, seq: Drafting, draft: list[int]) -> None:
        """Note what a round of a call has drafted."""
        self._wrote(self._reads(seq), draft[:-1])

    def _foreseeable(self, seqs: list[Drafting], reads: list[Window], choices: list[Choice]) -> bool:
        """Return whether one call can run several passes: only logits decide, or penalties that the call counts."""
        chaining = self.runner.chaining
        if not self.runner.rewinds or chaining is None or chaining.outputs != self._vocabulary:
            return False
        adjusted = [seq for seq, choice in zip(seqs, choices, strict=True) if choice.adjustment is not None]
        known = not adjusted or (not chaining.kept and all(seq.structure is None for seq in adjusted))
        return known and sum(len(read.tokens) for read in reads) <= MOST_ROWS

    def _at_once(
        self, seqs: list[Drafting], lengths: list[int], reads: list[Window], choices: list[Choice]
    ) -> list[list[int]]:
        """Draft all tokens in one call."""
        wanted, growing = np.array(lengths, np.int64), [seq.growing() for seq in seqs]
        if any(choice.temperature for choice in choices) or any(growing):
            written = self.runner.draft(Windows.of(reads), wanted, choices, growing)
        else:
            _, scores, _ = self.runner.chain(Windows.of(reads), wanted)
            written = [tokens.tolist() for tokens in np.split(scores.tokens, wanted.cumsum()[:-1])]
        drafts = []
        for seq, read, tokens in zip(seqs, reads, written, strict=True):
            end = next((i for i, token in enumerate(tokens, 1) if token in seq.ending), len(tokens))
            drafts.append(tokens[:end])
            self._wrote(read, tokens[: end - 1])
        return drafts

    def _stepwise(self, seqs: list[Drafting], lengths: list[int], reads: list[Window]) -> list[list[int]]:
        """Draft one token of each sequence per pass."""
        drafts: list[list[int]] = [[] for _ in seqs]
        going = list(range(len(seqs)))
        logits = self._read(reads)
        while going:
            choices = [seqs[i].choice(len(drafts[i]), drafts[i]) for i in going]
            started = time.perf_counter()
            tokens: list[int] = choose(logits[:, : self._vocabulary], choices).tokens.tolist()
            self.runner.cost.choose(len(tokens), time.perf_counter() - started)
            for i, token in zip(going, tokens, strict=True):
                drafts[i].append(token)
            going = [i for i in going if len(drafts[i]) < lengths[i] and drafts[i][-1] not in seqs[i].ending]
            if going:
                ends = ((seqs[i], drafts[i]) for i in going)
                windows = [
                    Window(s.slot, len(s.tokens) + len(draft) - 1, [draft[-1]], 1, drafted=1) for s, draft in ends
                ]
                logits = self.runner.run(windows)
        for read, draft in zip(reads, drafts, strict=True):
            self._wrote(read, draft[:-1])
        return drafts

    def _read(self, reads: list[Window]) -> Array:
        """Read windows, in several passes if necessary; return the logits of the last token of each."""
        ends: dict[int, Array] = {}
        for batch in fill_passes(Windows.of([]), reads, MOST_ROWS):
            ends.update(zip([w.slot for w in batch if w.logits], self.runner.run(batch), strict=True))
        return stacked([ends[read.slot] for read in reads])
