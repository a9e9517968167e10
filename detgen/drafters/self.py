"""The target drafts for itself: an ordinary dynamic-shape decode batch, verified every few tokens.

This is the scheme of LLM-42 (arXiv 2601.17768, section 3): the fast path decodes with whatever kernels the live batch
happens to use and writes provisional KV entries, which verification overwrites with canonical ones. Unverified requests
are decoded in the same batch; with another drafter they are decoded in the canonical passes, which cost less than
passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.drafters.stepwise import draft_stepwise
from detgen.kernels.sampling import choose
from detgen.passes.forward import Forward
from detgen.passes.packing import FREE_SHAPES, Window, Windows


class FastPath:
    """Decodes one token per pass for drafting and unverified sequences together.

    Args:
        forward: passes of the target.
        unverified: returns the sequences of unverified requests that can go on.
        commit: called with their windows and logits, float32 [sequences, vocabulary], after each pass.
    """

    def __init__(
        self,
        forward: Forward,
        unverified: Callable[[], Sequence[Drafting]],
        commit: Callable[[Windows, torch.Tensor], None],
    ) -> None:
        self._forward = forward
        self._unverified = unverified
        self._commit = commit

    @property
    def passes(self) -> int:
        """Passes run so far."""
        return self._forward.passes

    def decode(self, drafting: list[tuple[Drafting, list[int]]]) -> list[int]:
        """Run one pass: choose the next token of each drafting sequence, commit one of each unverified sequence.

        Args:
            drafting: sequences and the tokens drafted for them in this round so far.

        Returns:
            One token per drafting sequence.
        """
        unverified = self._unverified()
        windows = [_last(seq, draft) for seq, draft in drafting] + [_last(seq, []) for seq in unverified]
        if not windows:
            return []
        logits = self._forward.run(windows, FREE_SHAPES)
        if unverified:
            self._commit(Windows.of(windows[len(drafting) :]), logits[len(drafting) :])
        if not drafting:
            return []
        choices = [seq.choice(len(draft), draft) for seq, draft in drafting]
        tokens: list[int] = choose(logits[: len(drafting)], choices).tokens.tolist()
        return tokens


def _last(seq: Drafting, draft: list[int]) -> Window:
    """The window of the last token of a sequence with its draft."""
    token = draft[-1] if draft else seq.tokens[-1]
    return Window(seq.slot, len(seq.tokens) - 1 + len(draft), [token], 1)


class SelfDrafter:
    """Drafts with the target's own fast path.

    Args:
        fast: the fast path.
        draft_tokens: tokens between verifications.
    """

    name = "self"

    def __init__(self, fast: FastPath, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens
        self._fast = fast

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; stops after a token that ends it."""
        return draft_stepwise(self.name, seqs, lengths, self._fast.decode)


def make(parts: Parts) -> Drafter:
    """Make the drafter, which drafts `verify_window` tokens per round."""
    return SelfDrafter(parts.fast, parts.verify_window)
