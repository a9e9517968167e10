"""Drafting by a smaller model. Its KV cache uses the target's page tables; rolling back sets a length."""

from __future__ import annotations

from detgen.drafters.passes import PassDrafter
from detgen.drafters.protocol import Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.kernels.input_batch import Window, common_prefix
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner


class ModelDrafter(PassDrafter):
    """Drafts with a draft model.

    Args:
        runner: passes of the draft model.
        vocabulary: see `PassDrafter`.
        context: most positions of the draft model.
    """

    name = "model"
    again = 2  # of a draft that was accepted, it has not read the last token

    def __init__(self, runner: ModelRunner, vocabulary: int, context: int) -> None:
        super().__init__(runner, vocabulary, context)
        self._held: dict[int, list[int]] = {}

    def start(self, slot: int, tokens: list[int], cached: int) -> None:
        """Note that a sequence takes `slot`, whose first `cached` positions are shared with others.

        The pages say how many of these tokens the draft model has read.
        """
        pages = self.runner.cache.pages
        held = 0
        for page in pages.tables[slot, : -(-cached // PAGE)].tolist():
            read = int(pages.drafted[page])
            held += read
            if read < PAGE:
                break
        self._held[slot] = tokens[: min(held, cached)]

    def unread(self, seq: Drafting) -> int:
        """Return about how many of the sequence's tokens the model must read before it can draft."""
        return max(len(seq.tokens) - len(self._held.get(seq.slot, ())), 1)

    def _reads(self, seq: Drafting) -> Window:
        """Return the tokens committed since the last draft; roll back to what was accepted."""
        held = self._held[seq.slot]
        # The last committed token always goes through a pass, for its logits.
        at = min(common_prefix(held, seq.tokens), len(seq.tokens) - 1)
        del held[at:]
        return Window(seq.slot, at, seq.tokens[at:], 1)

    def _wrote(self, window: Window, draft: list[int]) -> None:
        """Note which tokens the cache holds, also in the pages, for other sequences that share them."""
        slot, first, end = window.slot, window.start, window.start + len(window.tokens)
        self._held[slot][first:] = [*window.tokens, *draft]
        pages = self.runner.cache.pages
        # From the block before on, which accepted drafts may have filled.
        for block in range(max(first // PAGE - 1, 0), -(-end // PAGE)):
            pages.drafted[pages.tables[slot, block]] = min(end - block * PAGE, PAGE)


def make(parts: Parts) -> Drafter:
    """Return the engine's only model drafter: its cache follows the target's pages."""
    assert parts.model is not None
    return parts.model
