"""A smaller model drafts, one token per pass, for all sequences together.

Its KV cache has the target's pages; rolling back sets a length back. Tokens are chosen with the noise that the target
will use (Gumbel coupling, arXiv 2408.07978), so they agree as often as the two distributions allow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.kernels.input_batch import MOST_ROWS, Window, Windows, common_prefix, fill_passes
from detgen.kernels.pass_cost import PassCost
from detgen.kernels.sampling import Choice, choose
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner


class ModelDrafter(Drafter):
    """Drafts with a draft model.

    Args:
        runner: passes of the draft model, which are unconstrained.
        vocabulary: entries of the target's logits.
        context: most positions of the draft model.
    """

    name = "model"

    def __init__(self, runner: ModelRunner, vocabulary: int, context: int) -> None:
        self.runner = runner
        self._vocabulary = vocabulary
        self._context = context
        self._chains = runner.chaining is not None and runner.chaining.outputs == vocabulary
        self._held: dict[int, list[int]] = {}

    @property
    def cost(self) -> PassCost:
        """Cost of a pass of the draft model and of choosing its tokens."""
        return self.runner.cost

    def start(self, slot: int, tokens: list[int], cached: int) -> None:
        """Note that a sequence takes `slot`, whose first `cached` positions are shared with others.

        Of these the draft model has read the tokens whose pages say so.
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
        """About how many of the sequence's tokens it has to read before it can draft."""
        return max(len(seq.tokens) - len(self._held.get(seq.slot, ())), 1)

    def room(self, seq: Drafting) -> int:
        """How many tokens it can draft at most, since its context ends; 0 and less for none."""
        return self._context - len(seq.tokens)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; stops after a token that ends it and at the context's end."""
        lengths = [min(n, self.room(s)) for s, n in zip(seqs, lengths, strict=True)]
        choices = [seq.choice() for seq in seqs] if self._chains else []
        if choices and all(choice.adjustment is None for choice in choices):
            reads = self._behind([s for s, n in zip(seqs, lengths, strict=True) if n > 0])
            if 0 < sum(len(read.tokens) for read in reads) <= MOST_ROWS:
                return self._draft_at_once(seqs, lengths, reads, choices)
        return self._draft_stepwise(seqs, lengths)

    def _draft_at_once(
        self, seqs: Sequence[Drafting], lengths: list[int], reads: list[Window], choices: list[Choice]
    ) -> list[Draft]:
        """All drafts in one call, as nothing but the logits decides."""
        drafts = [Draft([], self.name) for _ in seqs]
        going = [i for i, n in enumerate(lengths) if n > 0]
        wanted = np.array([lengths[i] for i in going], np.int64)
        if any(choice.temperature for choice in choices):
            written = self.runner.draft(Windows.of(reads), wanted, [choices[i] for i in going])
        else:
            _, scores = self.runner.chain(Windows.of(reads), wanted)
            written = [tokens.tolist() for tokens in np.split(scores.tokens, wanted.cumsum()[:-1])]
        for i, tokens in zip(going, written, strict=True):
            for token in tokens:
                drafts[i].tokens.append(token)
                if token in seqs[i].ending:
                    break
        for i, read in zip(going, reads, strict=True):
            self._held[read.slot] = seqs[i].tokens + drafts[i].tokens[:-1]
            self._mark(read.slot, read.start, read.start + len(read.tokens))
        return drafts

    def _draft_stepwise(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """A token of each draft in a pass."""
        drafts: list[list[int]] = [[] for _ in seqs]
        going = [i for i, n in enumerate(lengths) if n > 0]
        while going:
            tokens = self._decode([(seqs[i], drafts[i]) for i in going])
            for i, token in zip(going, tokens, strict=True):
                drafts[i].append(token)
            going = [i for i in going if len(drafts[i]) < lengths[i] and drafts[i][-1] not in seqs[i].ending]
        return [Draft(d, self.name) for d in drafts]

    def _decode(self, drafting: list[tuple[Drafting, list[int]]]) -> list[int]:
        """Run a pass, or several to catch up; return the next token of each sequence after its draft so far."""
        if drafting[0][1]:
            logits = self._run([Window(s.slot, len(self._held[s.slot]), [draft[-1]], 1) for s, draft in drafting])
        else:
            logits = self._catch_up([s for s, _ in drafting])
        choices = [s.choice(len(draft), draft) for s, draft in drafting]
        started = time.perf_counter()
        tokens: list[int] = choose(logits[:, : self._vocabulary], choices).tokens.tolist()
        self.cost.choose(len(tokens), time.perf_counter() - started)
        return tokens

    def _catch_up(self, seqs: list[Drafting]) -> torch.Tensor:
        """Read the tokens committed since; return the logits of each sequence's last committed token."""
        reads = self._behind(seqs)
        ends: dict[int, torch.Tensor] = {}
        for batch in fill_passes(Windows.of([]), reads, MOST_ROWS):
            wanted = [w.slot for w in batch if w.logits]
            ends.update(zip(wanted, self._run(batch), strict=True))
        for read in reads:
            self._mark(read.slot, read.start, read.start + len(read.tokens))
        return torch.stack([ends[s.slot] for s in seqs])

    def _behind(self, seqs: Sequence[Drafting]) -> list[Window]:
        """The tokens committed since; rolls back to what was accepted."""
        reads = []
        for seq in seqs:
            # The last committed token always goes through a pass, for its logits.
            held = self._held[seq.slot]
            at = min(common_prefix(held, seq.tokens), len(seq.tokens) - 1)
            del held[at:]
            reads.append(Window(seq.slot, at, seq.tokens[at:], 1))
        return reads

    def _mark(self, slot: int, first: int, end: int) -> None:
        """Note in the pages that committed tokens were read, for other sequences that share them."""
        pages = self.runner.cache.pages
        # From the block before on, which accepted drafts may have filled.
        for block in range(max(first // PAGE - 1, 0), -(-end // PAGE)):
            pages.drafted[pages.tables[slot, block]] = min(end - block * PAGE, PAGE)

    def _run(self, windows: Iterable[Window]) -> torch.Tensor:
        windows = list(windows)
        for w in windows:
            self._held[w.slot][w.start :] = w.tokens
        return self.runner.run(windows)


def make(parts: Parts) -> Drafter:
    """The engine's only one, since its cache follows the target's pages."""
    assert parts.model is not None
    return parts.model
