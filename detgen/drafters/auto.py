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
from detgen.drafters.protocol import Drafting
from detgen.kernels.cost import PassCost

_MODEL_DEPTHS = (0, 1, 2, 3, 4, 6, 8)
_NGRAM_DEPTHS = (0, 3, 6, 12)
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
        self._model_depths = (0,) if model is None else _MODEL_DEPTHS if depth is None else (0, depth)
        self._ngram_depths = _NGRAM_DEPTHS if depth is None else (0, depth)
        self._seen = dict(_PRIOR)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> tuple[list[list[int]], list[str]]:
        """At most lengths[i] tokens for seqs[i], and the name of the drafter that each draft comes from."""
        room = np.array(lengths)
        found = self._ngram.draft(seqs, [min(n, self._ngram_depths[-1]) for n in lengths])
        looked_up = np.array([len(f) for f in found])
        rates = {name: self._rates(seqs, name) for name in _PRIOR}
        model_depths, ngram_depths = self._best(room, looked_up, rates)
        chosen = [f[:n] for f, n in zip(found, ngram_depths, strict=True)]
        names = ["ngram" if n else "none" for n in ngram_depths]
        if self._model is not None and model_depths.any():
            picks = np.flatnonzero(model_depths).tolist()
            drafts = self._model.draft([seqs[i] for i in picks], [int(model_depths[i]) for i in picks])
            for i, draft in zip(picks, drafts, strict=True):
                chosen[i], names[i] = draft, "model" if draft else "none"
        return chosen, names

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
        self, room: np.ndarray, looked_up: np.ndarray, rates: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft lengths by model and by look-up, int [sequences] each; at most one of the two is above 0."""
        draft_pass = self._model.cost if self._model is not None else None
        best, best_speed = (np.zeros_like(room), np.zeros_like(room)), 0.0
        for deep in self._model_depths:
            by_model = np.minimum(deep, room)
            model_gain = _expected(rates["model"], by_model)
            for far in self._ngram_depths:
                by_ngram = np.minimum(far, looked_up)
                ngram_gain = _expected(rates["ngram"], by_ngram)
                prefer = ngram_gain >= model_gain
                gain = len(room) + np.where(prefer, ngram_gain, model_gain).sum()
                rows = len(room) + np.where(prefer, by_ngram, by_model).sum()
                seconds = self._cost.predict(float(rows))
                drafting = int((~prefer).sum())
                if drafting and draft_pass is not None:
                    seconds += deep * draft_pass.predict(drafting)
                speed = gain / seconds if seconds else 0.0
                if speed > best_speed:
                    best = np.where(prefer, 0, by_model), np.where(prefer, by_ngram, 0)
                    best_speed = speed
        return best


def _expected(rate: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Expected accepted tokens of a draft: rate + rate**2 + ... + rate**length."""
    total: np.ndarray = rate * (1 - rate**length) / (1 - rate)
    return total
