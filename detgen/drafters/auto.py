"""Chooses drafter and draft length for each sequence and round, from measured cost and acceptance.

Candidates are no draft, the n-gram look-up and the draft model. (The fast path of the target is none: its pass costs
what a canonical pass over as few rows costs, so it cannot win.) A round is priced with the passes' measured cost as a
function of their rows, its gain with each sequence's running acceptance; the round of the most tokens a second is
taken. The choice depends on timing; the output does not depend on the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.protocol import Draft, Drafting
from detgen.kernels.cost import PassCost

_MODEL_DEPTHS = (1, 2, 3, 4, 6)
_PRIOR = {"model": (2.0, 3.0), "ngram": (1.0, 2.0)}  # accepted and tried, before anything was seen


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
        self._depths = () if model is None else _MODEL_DEPTHS if depth is None else (depth,)
        self._speed = 0.0  # expected tokens a second of the last round
        self._seen = dict(_PRIOR)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; a draft of none is by \"none\"."""
        found = self._ngram.draft(seqs, lengths)
        room, looked_up = np.array(lengths), np.array([len(f.tokens) for f in found])
        model_depths, ngram_depths = self._best(room, looked_up, self._rates(seqs, "model"), self._rates(seqs, "ngram"))
        chosen = [Draft(f.tokens[:n], "ngram" if n else "none") for f, n in zip(found, ngram_depths, strict=True)]
        if self._model is not None and model_depths.any():
            picks = np.flatnonzero(model_depths).tolist()
            drafts = self._model.draft([seqs[i] for i in picks], [int(model_depths[i]) for i in picks])
            for i, draft in zip(picks, drafts, strict=True):
                chosen[i] = draft if draft.tokens else Draft([], "none")
        return chosen

    def learn(self, drafter: str, accepted: int, tried: int) -> None:
        """Take in one verified window."""
        if drafter in self._seen:
            hits, tries = self._seen[drafter]
            self._seen[drafter] = (hits * 0.995 + accepted, tries * 0.995 + tried)

    def _rates(self, seqs: Sequence[Drafting], name: str) -> np.ndarray:
        """Estimated acceptance of one drafted token, float64 [sequences]: each one's own, drawn to that of all."""
        hits, tries = self._seen[name]
        overall = hits / tries
        own = np.array([s.acceptance.get(name, (0.0, 0.0)) for s in seqs]).reshape(-1, 2)
        rates: np.ndarray = np.clip((own[:, 0] + 2 * overall) / (own[:, 1] + 2), 0.02, 0.98)
        return rates

    def _best(
        self, room: np.ndarray, looked_up: np.ndarray, model_rates: np.ndarray, ngram_rates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft lengths by model and by look-up, int [sequences] each; at most one of the two is above 0."""
        none = np.zeros_like(room)
        plain = self._price(none, none, 0.0)
        self._speed = max(self._speed, plain)
        by_ngram = np.minimum(looked_up, self._worthwhile(ngram_rates))
        ngram_gain = _expected(ngram_rates, by_ngram)
        worthwhile = np.minimum(room, self._worthwhile(model_rates))
        best, self._speed = (none, by_ngram), self._price(by_ngram, ngram_gain, 0.0)
        if plain > self._speed:
            best, self._speed = (none, none), plain
        if self._model is None:
            return best
        for depth in self._depths:
            by_model = np.minimum(depth, worthwhile)
            model_gain = _expected(model_rates, by_model)
            modelled = model_gain > ngram_gain
            if modelled.any():
                rows = np.where(modelled, by_model, by_ngram)
                drafting = depth * self._model.cost.predict(int(modelled.sum()))
                speed = self._price(rows, np.where(modelled, model_gain, ngram_gain), drafting)
                if speed > self._speed:
                    best, self._speed = (np.where(modelled, by_model, 0), np.where(modelled, 0, by_ngram)), speed
        return best

    def _worthwhile(self, rates: np.ndarray) -> np.ndarray:
        """How many tokens are worth drafting: until the next one gains less than its row costs, at the last speed."""
        if self._depth is not None:
            return np.full(len(rates), self._depth)
        least = np.clip(self._speed * self._cost.slope, 1e-3, 0.9)
        depths: np.ndarray = np.floor(np.log(least) / np.log(rates)).astype(np.int64)
        return depths

    def _price(self, drafted: np.ndarray, gain: np.ndarray, drafting: float) -> float:
        """Expected tokens a second of a round of these drafts, which took `drafting` seconds to make."""
        seconds = self._cost.predict(float(len(drafted) + drafted.sum())) + drafting
        return float((len(drafted) + gain.sum()) / seconds) if seconds else 0.0


def _expected(rate: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Expected accepted tokens of a draft: rate + rate**2 + ... + rate**length."""
    total: np.ndarray = rate * (1 - rate**length) / (1 - rate)
    return total
