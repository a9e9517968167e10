"""A smaller model drafts, one token per pass, for all sequences together.

Its KV cache has the target's slots; rolling back sets a length back. Tokens are chosen with the noise that the target
will use (Gumbel coupling, arXiv 2408.07978), so they agree as often as the two distributions allow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.kernels.sampling import choose
from detgen.passes.cost import PassCost
from detgen.passes.forward import Forward
from detgen.passes.packing import FREE_SHAPES, READ_ROWS, Window, common_prefix


class ModelDrafter:
    """Drafts with a draft model.

    Args:
        forward: passes of the draft model, which are unconstrained.
        vocabulary: entries of the target's logits.
        context: most positions of the draft model.
        eos: token ids after which nothing is drafted.
    """

    name = "model"

    def __init__(self, forward: Forward, vocabulary: int, context: int, eos: frozenset[int]) -> None:
        self.forward = forward
        self._vocabulary = vocabulary
        self._context = context
        self._eos = eos
        self._held: dict[int, list[int]] = {}

    @property
    def cost(self) -> PassCost:
        """Cost of a pass of the draft model and of choosing its tokens."""
        return self.forward.cost

    def start(self, slot: int, source: int | None, length: int) -> None:
        """Note that a new sequence takes `slot`; its first `length` tokens are those of slot `source`, if any."""
        if source is None:
            self._held[slot] = []
            return
        held = self._held.get(source, [])
        length = min(length, len(held))
        if source != slot:
            self.forward.cache.copy_prefix(source, slot, length)
        self._held[slot] = held[:length]

    def behind(self, seq: Drafting) -> int:
        """About how many of the sequence's tokens it has to read before it can draft."""
        return max(len(seq.tokens) - len(self._held.get(seq.slot, ())), 1)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; stops after an end-of-sequence token and at the context's end."""
        lengths = [min(n, self._context - len(s.tokens)) for s, n in zip(seqs, lengths, strict=True)]
        drafts: list[list[int]] = [[] for _ in seqs]
        going = [i for i, n in enumerate(lengths) if n > 0]
        logits = self._catch_up([seqs[i] for i in going]) if going else None
        while logits is not None:
            row_choices = [seqs[i].choice(len(drafts[i])) for i in going]
            started = time.perf_counter()
            tokens = choose(logits[:, : self._vocabulary], row_choices).tokens.tolist()
            self.cost.choose(len(tokens), time.perf_counter() - started)
            for i, token in zip(going, tokens, strict=True):
                drafts[i].append(token)
            going = [i for i in going if len(drafts[i]) < lengths[i] and drafts[i][-1] not in self._eos]
            if not going:
                break
            windows = [Window(seqs[i].slot, len(self._held[seqs[i].slot]), [drafts[i][-1]], 1) for i in going]
            logits = self._run(windows)
        return [Draft(d, self.name) for d in drafts]

    def _catch_up(self, seqs: Sequence[Drafting]) -> torch.Tensor:
        """Read the tokens committed since; return the logits of each sequence's last committed token."""
        budget = READ_ROWS
        ends: dict[int, torch.Tensor] = {}
        batch: list[Window] = []
        free = budget

        def flush() -> None:
            nonlocal free
            wanted = [w.slot for w in batch if w.logits]
            ends.update(zip(wanted, self._run(batch), strict=True))
            batch.clear()
            free = budget

        for seq in seqs:
            # Roll back to what was accepted; the last committed token always goes through a pass, for its logits.
            held = self._held[seq.slot]
            at = min(common_prefix(held, seq.tokens), len(seq.tokens) - 1)
            del held[at:]
            while at < len(seq.tokens):
                part = seq.tokens[at : at + free]
                at += len(part)
                batch.append(Window(seq.slot, at - len(part), part, int(at == len(seq.tokens))))
                free -= len(part)
                if not free:
                    flush()
        if batch:
            flush()
        return torch.stack([ends[s.slot] for s in seqs])

    def _run(self, windows: list[Window]) -> torch.Tensor:
        for w in windows:
            self._held[w.slot][w.start :] = w.tokens
        return self.forward.run(windows, FREE_SHAPES)


def make(parts: Parts) -> Drafter | None:
    """The engine's only one, since its cache follows the target's slots."""
    return parts.model
