"""Chooses drafter and draft length for each sequence and round, from measured cost and acceptance.

Candidates are no draft, the n-gram look-up and the draft model. (The fast path of the target is none: its pass costs
what a canonical pass over as few rows costs, so it cannot win.) A drafted token is worth its row of the canonical pass
while the chance that it is accepted exceeds the row's cost times the speed so far; the draft model drafts where what
it gains over the look-up is worth its passes. The choice depends on timing; the output does not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.protocol import Draft, Drafting
from detgen.kernels.cost import PassCost
from detgen.kernels.tiles import tile_area

_MODEL_DEPTHS = (1, 2, 3, 4, 6)
_PRIOR = {"model": (2.0, 3.0), "ngram": (1.0, 2.0)}  # accepted and tried, before anything was seen
_NOTHING = Draft([], "none")


class AutoDrafter:
    """Drafts by the cheapest means a token.

    Args:
        ngram: the look-up.
        model: the draft model, if there is one.
        target_cost: of canonical passes.
        depth: fixed draft length; None adapts.
    """

    name = "auto"

    def __init__(
        self, ngram: NgramDrafter, model: ModelDrafter | None, target_cost: PassCost, depth: int | None
    ) -> None:
        self._ngram = ngram
        self._model = model
        self._cost = target_cost
        self._depth = depth
        self._depths = _MODEL_DEPTHS if depth is None else (depth,)
        self._speed = 0.0  # expected tokens a second of the last round
        self._seen = dict(_PRIOR)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; a draft of none is by "none"."""
        keys = max(len(seq.tokens) for seq in seqs)
        plain = self._rate(len(seqs), [0] * len(seqs), keys, 0.0)
        self._speed = max(self._speed, plain)
        found = self._ngram.draft(seqs, lengths)
        rates = [self._acceptance(seq, "ngram") for seq in seqs]
        worth = [min(len(d.tokens), self._worthwhile(r)) for d, r in zip(found, rates, strict=True)]
        depths, gain, self._speed = [0] * len(seqs), 0.0, plain
        # Tiles are as wide as the longest draft, so the longest ones are cut to what pays for all of them.
        for cap in range(1, max(worth) + 1):
            cut = [min(w, cap) for w in worth]
            more = gain + sum(r**cap for r, w in zip(rates, worth, strict=True) if w >= cap)
            speed = self._rate(len(seqs) + more, cut, keys, 0.0)
            gain = more
            if speed > self._speed:
                depths, self._speed = cut, speed
        drafts = [Draft(f.tokens[:n], "ngram") if n else _NOTHING for f, n in zip(found, depths, strict=True)]
        if self._model is not None:
            gains = [_expected(r, n) for r, n in zip(rates, depths, strict=True)]
            self._draft_by_model(self._model, seqs, lengths, drafts, gains)
        return drafts

    def _draft_by_model(
        self, model: ModelDrafter, seqs: Sequence[Drafting], lengths: list[int], drafts: list[Draft], gains: list[float]
    ) -> None:
        """Let the draft model write instead, where and as far as that makes the round faster; `drafts` in place."""
        count, keys = len(seqs), max(len(seq.tokens) for seq in seqs)
        rates = [self._acceptance(seq, "model") for seq in seqs]
        worthwhile = [min(n, self._worthwhile(rate)) for n, rate in zip(lengths, rates, strict=True)]
        best: dict[int, int] = {}
        for depth in self._depths:
            picks: dict[int, int] = {}
            tokens, read = count + sum(gains), 0.0
            cut = [len(d.tokens) for d in drafts]
            for i, rate in enumerate(rates):
                length = min(depth, worthwhile[i])
                gain = _expected(rate, length)
                if gain > gains[i]:
                    picks[i] = length
                    tokens += gain - gains[i]
                    cut[i] = length
                    # What it has to read first serves all of the sequence's rounds to come.
                    read += model.behind(seqs[i]) * min((gain + 1) / lengths[i], 1.0)
            if picks:
                first = model.cost.predict(max(read, len(picks)))
                speed = self._rate(tokens, cut, keys, first + (depth - 1) * model.cost.predict(len(picks)))
                if speed > self._speed:
                    best, self._speed = picks, speed
        if best:
            written = model.draft([seqs[i] for i in best], list(best.values()))
            for i, draft in zip(best, written, strict=True):
                drafts[i] = draft if draft.tokens else _NOTHING

    def learn(self, drafter: str, accepted: int, tried: int) -> None:
        """Take in one verified window."""
        if drafter in self._seen:
            hits, tries = self._seen[drafter]
            self._seen[drafter] = (hits * 0.995 + accepted, tries * 0.995 + tried)

    def _acceptance(self, seq: Drafting, name: str) -> float:
        """Estimated acceptance of one drafted token: the sequence's own, drawn to that of all."""
        hits, tries = self._seen[name]
        own_hits, own_tries = seq.acceptance.get(name, (0.0, 0.0))
        return min(max((own_hits + 2 * hits / tries) / (own_tries + 2), 0.02), 0.98)

    def _worthwhile(self, rate: float) -> int:
        """How many tokens are worth drafting: until the next one gains less than its row costs, at the last speed."""
        if self._depth is not None:
            return self._depth
        least = min(max(self._speed * self._cost.slopes()[0], 1e-3), 0.9)
        return int(math.log(least) / math.log(rate))

    def _rate(self, tokens: float, drafted: list[int], keys: int, drafting: float) -> float:
        """Tokens a second of a round that commits `tokens`, by a pass over these drafts after `drafting` seconds."""
        count = len(drafted)
        area = tile_area(count, 1 + max(drafted), keys)
        seconds = self._cost.predict(count + sum(drafted), area) + drafting
        return tokens / seconds if seconds else 0.0


def _expected(rate: float, length: int) -> float:
    """Expected accepted tokens of a draft: rate + rate**2 + ... + rate**length."""
    return rate * (1 - rate**length) / (1 - rate)
