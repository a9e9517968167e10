"""Chooses drafter and draft length for each sequence and round, from measured cost and acceptance.

The candidates are no draft, the n-gram look-up and the draft model. (Not the target's fast path: its pass costs as much
as a canonical pass over so few rows, so it cannot win.) A draft token is worth its row of the canonical pass while its
chance of acceptance exceeds the row's cost times the speed so far; the draft model drafts if its gain over the look-up
is worth its passes. The choice depends on timing; the output does not depend on the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.pace import Pace
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.registry import Parts
from detgen.passes.cost import PassCost
from detgen.passes.tiles import attention_area

_MODEL_DRAFT_TOKENS = (1, 3, 6)
# Prior acceptance of the draft model, and of the look-up by the length of its match, from 1.
_MODEL_PRIOR = 0.67
_NGRAM_PRIOR = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.9)
_ADAPTIVE = 8  # most tokens of an adaptive draft
_WEIGHT = 2.0  # weight of a prior, in tokens tried
_KNOWN = 8.0  # tokens tried, the prior's included, from which a rate is known
_FEW, _UNSURE = 4, 8  # where a rate is not known, so many sequences draft, or one of so many
_NOTHING = Draft([], "none")


class _Rate:
    """An acceptance rate in which old tries fade."""

    __slots__ = ("hits", "prior", "tries")

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.hits, self.tries = _WEIGHT * prior, _WEIGHT

    @property
    def known(self) -> bool:
        """Whether it says more than the prior does."""
        return self.tries >= _KNOWN

    def doubt(self, towards: float) -> None:
        """Let some tries decide whether it still holds: until then it is half of what it was and half `towards`."""
        value = (self.value + towards) / 2
        self.tries = min(self.tries, _KNOWN - 2)
        self.hits = self.tries * value

    def learn(self, hits: int, tries: int) -> None:
        self.hits = self.hits * 0.995 + hits
        self.tries = self.tries * 0.995 + tries

    @property
    def value(self) -> float:
        """The rate, within bounds that keep every choice open."""
        return min(max(self.hits / self.tries, 0.02), 0.98)


class AutoDrafter:
    """Drafts by whatever makes the round fastest.

    Args:
        ngram: the look-up.
        model: the draft model, if there is one.
        target_cost: cost of canonical passes.
        most_rows: most rows of a canonical pass; a larger round takes several.
        draft_tokens: draft tokens per round; None adapts.
    """

    name = "auto"

    def __init__(
        self,
        ngram: NgramDrafter,
        model: ModelDrafter | None,
        target_cost: PassCost,
        most_rows: int,
        draft_tokens: int | None,
    ) -> None:
        self._ngram = ngram
        self._model = model
        self._cost = target_cost
        self._most_rows = most_rows
        self.draft_tokens = draft_tokens or _ADAPTIVE
        self._draft_tokens = draft_tokens
        self._choices = _MODEL_DRAFT_TOKENS if draft_tokens is None else (draft_tokens,)
        self._speed = 0.0  # expected tokens per second of the last round
        self._by_model = _Rate(_MODEL_PRIOR)
        self._by_match = [_Rate(prior) for prior in _NGRAM_PRIOR]
        self._matched: dict[int, int] = {}  # by slot
        self._ways = ("ngram", "none") if model is None else ("model", "ngram", "none")
        self._paces: dict[int, Pace] = {}  # by the magnitude of the number of sequences
        self._pace = Pace(self._ways, self._ways[-1])  # the one of the last round
        self._trying = False  # whether the draft model drafted for a few in the last round, to know how good it is
        self._idle = False  # whether it drafted for nobody
        self._plain = 0.0  # predicted seconds of a token of the last round, if nothing is drafted
        self._predicted = 0.0  # seconds of the last round: of its draft, as measured, and of its passes
        self._beside = 0.0  # seconds that a round takes beside what is predicted
        self._slower = 1.0  # times what is predicted that a draft by the model takes

    @property
    def patient(self) -> bool:
        """Whether a few passes may be run before it is asked again."""
        return self._pace.way == "none"

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; the drafter of an empty draft is "none"."""
        first = not self._paces
        self._pace = self._paces.setdefault(len(seqs).bit_length(), Pace(self._ways, self._pace.best, first=first))
        keys = sum(len(seq.tokens) for seq in seqs)
        self._plain = max(self._seconds([0] * len(seqs), keys), 1e-9) / len(seqs)
        self._trying, self._idle = False, True
        return [_NOTHING] * len(seqs) if self._pace.way == "none" else self._draft(seqs, lengths, keys)

    def timed(self, tokens: int, seconds: float) -> None:
        """Take in what a round of nothing but decoding gave, and its time."""
        if self._pace.way != "none":
            self._beside = max(0.9 * self._beside + 0.1 * min(seconds - self._predicted, 2e-3), 0.0)
        if self._trying:
            return
        if self._pace.way == "model" and self._idle and self._pace.give_up():
            return
        again = self._pace.learn(tokens, seconds, tokens * self._plain)
        if again and self._pace.way == "model":
            self._by_model.doubt(self._by_model.value)
        elif again and self._pace.way == "ngram":
            for rate in self._by_match:
                rate.doubt(rate.prior)

    def _draft(self, seqs: Sequence[Drafting], lengths: list[int], keys: int) -> list[Draft]:
        """As `draft`; `keys` are the tokens of the sequences."""
        count = len(seqs)
        self._predicted = 0.0
        plain = 1 / (self._plain + self._beside / count)
        self._speed = max(self._speed, plain)
        least = self._least()
        found = []
        chances = []  # of each token of each draft: that it and all before it are accepted
        unsure = self._few(count)
        for seq, length in zip(seqs, lengths, strict=True):
            tokens, matched = self._ngram.look_up(
                seq, length if self._draft_tokens is None else min(length, self._draft_tokens)
            )
            self._matched[seq.slot] = matched
            if tokens and not self._by_match[matched - 1].known:
                unsure -= 1
                tokens = tokens if unsure >= 0 else []
            found.append(tokens)
            chances.append(self._chances(matched, len(tokens), least))
        counts, gain, self._speed = [0] * count, 0.0, plain
        # Tiles are as wide as the longest draft, so long drafts are cut to the length that pays for all.
        for cap in range(1, max(map(len, chances)) + 1):
            gain += sum(chance[cap - 1] for chance in chances if len(chance) >= cap)
            cut = [min(len(chance), cap) for chance in chances]
            speed = self._rate(count + gain, cut, keys, 0.0)
            if speed > self._speed:
                counts, self._speed = cut, speed
        drafts = [Draft(tokens[:n], "ngram") if n else _NOTHING for tokens, n in zip(found, counts, strict=True)]
        if self._model is not None and self._pace.way == "model" and not self._by_model.known:
            self._try_model(self._model, seqs, lengths, drafts)
        elif self._model is not None and self._pace.way == "model":
            gains = [sum(chance[:n]) for chance, n in zip(chances, counts, strict=True)]
            self._draft_by_model(self._model, seqs, lengths, drafts, gains, keys)
        self._predicted += self._seconds([len(draft.tokens) for draft in drafts], keys)
        return drafts

    def _chances(self, matched: int, length: int, least: float) -> list[float]:
        """Chances that the tokens after a match are accepted, each with all before it, down to `least`."""
        chances: list[float] = []
        chance = 1.0
        for i in range(length):
            # Each accepted token makes the match longer by one.
            chance *= self._by_match[min(matched + i, len(self._by_match)) - 1].value
            if chance < least:
                break
            chances.append(chance)
        return chances

    def _few(self, count: int) -> int:
        """For how many of so many sequences somebody drafts of whom nobody knows how good he is."""
        return max(count // _UNSURE, min(count, _FEW))

    def _try_model(
        self, model: ModelDrafter, seqs: Sequence[Drafting], lengths: list[int], drafts: list[Draft]
    ) -> None:
        """Replace a few drafts by short ones of the draft model, where it has the least to read."""
        able = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: model.behind(seqs[i]))
        some = able[: self._few(len(seqs))]
        written = model.draft([seqs[i] for i in some], [min(self._choices[0], lengths[i]) for i in some])
        for i, draft in zip(some, written, strict=True):
            drafts[i] = draft if draft.tokens else _NOTHING
        self._trying = any(draft.tokens for draft in written)

    def _draft_by_model(
        self,
        model: ModelDrafter,
        seqs: Sequence[Drafting],
        lengths: list[int],
        drafts: list[Draft],
        gains: list[float],
        keys: int,
    ) -> None:
        """Replace drafts by those of the draft model if that makes the round faster; changes `drafts` in place."""
        count = len(seqs)
        rates = [self._acceptance(seq) for seq in seqs]
        least = math.log(self._least())
        worthwhile = [min(n, int(least / math.log(rate))) for n, rate in zip(lengths, rates, strict=True)]
        best: dict[int, int] = {}
        expected = 0.0
        for most in self._choices:
            picks: dict[int, int] = {}
            tokens, read = count + sum(gains), 0.0
            cut = [len(d.tokens) for d in drafts]
            for i, rate in enumerate(rates):
                length = min(most, worthwhile[i])
                gain = _expected(rate, length)
                if gain > gains[i]:
                    picks[i] = length
                    tokens += gain - gains[i]
                    cut[i] = length
                    # The tokens it has to read first also serve the sequence's later rounds.
                    read += model.behind(seqs[i]) * min((gain + 1) / lengths[i], 1.0)
            if picks:
                first = model.cost.predict(max(read, len(picks)), chosen=len(picks))
                drafting = first + (most - 1) * model.cost.predict(len(picks))
                speed = self._rate(tokens, cut, keys, drafting * self._slower)
                if speed > self._speed:
                    best, self._speed, expected = picks, speed, drafting
        self._idle = not best
        if best:
            started = time.perf_counter()
            written = model.draft([seqs[i] for i in best], list(best.values()))
            self._predicted = time.perf_counter() - started
            self._slower = 0.9 * self._slower + 0.1 * min(self._predicted / expected, 4.0)
            for i, draft in zip(best, written, strict=True):
                drafts[i] = draft if draft.tokens else _NOTHING

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Update the acceptance rates after a verified window."""
        if drafter == "model":
            self._by_model.learn(accepted, tried)
        elif drafter == "ngram":
            matched = self._matched[seq.slot]
            for i in range(tried):
                self._by_match[min(matched + i, len(self._by_match)) - 1].learn(int(i < accepted), 1)

    def _acceptance(self, seq: Drafting) -> float:
        """Estimated acceptance of the draft model's tokens: the sequence's own, pulled towards the overall rate."""
        hits, tries = seq.acceptance.get("model", (0.0, 0.0))
        return min(max((hits + 2 * self._by_model.value) / (tries + 2), 0.02), 0.98)

    def _least(self) -> float:
        """The chance above which a draft token gains more than its row costs, at the last speed."""
        if self._draft_tokens is not None:
            return 1e-9  # the user set the length
        return min(max(self._speed * sum(self._cost.slopes()), 1e-3), 0.9)

    def _rate(self, tokens: float, drafted: list[int], keys: int, drafting: float) -> float:
        """Tokens per second of a round.

        Args:
            tokens: expected committed tokens.
            drafted: draft tokens of each sequence.
            keys: tokens of the sequences.
            drafting: seconds taken to draft.
        """
        seconds = self._seconds(drafted, keys) + drafting + self._beside
        return tokens / seconds if seconds else 0.0

    def _seconds(self, drafted: list[int], keys: int) -> float:
        """Predicted seconds of a round's passes; arguments as above."""
        rows, width = len(drafted) + sum(drafted), 1 + max(drafted)
        passes = -(-rows // (self._most_rows // width * width))  # a window is not divided
        return passes * self._cost.predict(rows / passes, attention_area(rows, keys) / passes)


def _expected(rate: float, length: int) -> float:
    """Expected accepted tokens of a draft: rate + rate**2 + ... + rate**length."""
    return rate * (1 - rate**length) / (1 - rate)


def make(parts: Parts) -> Drafter:
    """Make the drafter, with a look-up of its own."""
    return AutoDrafter(NgramDrafter(), parts.model, parts.target_cost, parts.most_rows, parts.draft_tokens)
