"""Chooses drafter and draft length for each sequence and round, from measured cost and acceptance.

The candidates are no draft, the n-gram look-up and the draft model. (Not the target's fast path: its pass costs as much
as a canonical pass over so few rows, so it cannot win.) A draft token is worth its row of the canonical pass while its
chance of acceptance exceeds the row's cost times the speed so far; the draft model drafts if its gain over the look-up
is worth its passes. How often a drafter is right is learnt from tokens that were generated without it, before it is
tried: they are looked up, or read by the draft model in one pass. The choice depends on timing; the output does not
depend on the choice.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.overhead import Overhead
from detgen.drafters.pace import Pace
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.rate import Rate, expected_accepted
from detgen.drafters.registry import Parts
from detgen.passes.cost import PassCost
from detgen.passes.tiles import attention_area

_MODEL_DRAFT_TOKENS = (1, 3, 6)
# Prior acceptance of the draft model, and of the look-up by the length of its match, from 1.
_MODEL_PRIOR = 0.67
_NGRAM_PRIOR = (0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.9)
_ADAPTIVE = 8  # most tokens of an adaptive draft
_BACK = 32  # tokens of a sequence that are looked back at, at most
_ENOUGH = 8  # tokens of all sequences that are worth looking back at
_READ, _LOOKED_UP = 8, 64  # tokens that are enough for the draft model, and for the look-up, which costs less
_CAPS = (1, 2, 4, 8)  # lengths of drafts that are tried on them
_SOON = 64  # tokens of each sequence after which the look-up is looked at again, if that costs little
_LOOKING = 0.005  # share of the time that it takes to look back, at most
_CALM = 16  # tokens of each sequence, of rounds without drafts that are taken in at once where no try is near
_NOTHING = Draft([], "none")


class _Rounds:
    """Rounds that are not taken in yet: what they gave, their time, and how many sequences each had."""

    __slots__ = ("count", "seconds", "sequences", "tokens")

    def __init__(self) -> None:
        self.clear(0)

    def clear(self, sequences: int) -> None:
        self.count, self.sequences = 0, sequences
        self.tokens = self.seconds = 0.0

    def add(self, tokens: float, seconds: float) -> float:
        """Add one; tokens of each sequence, of all rounds."""
        self.count += 1
        self.tokens += tokens
        self.seconds += seconds
        return self.tokens / self.sequences


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
        self._by_model = Rate(_MODEL_PRIOR)
        self._by_match = [Rate(prior) for prior in _NGRAM_PRIOR]
        self._matched: dict[int, int] = {}  # by slot
        self._ways = ("ngram", "none") if model is None else ("model", "ngram", "none")
        self._paces: dict[int, Pace] = {}  # by the magnitude of the number of sequences
        self._pace = Pace(self._ways, self._ways[-1])  # the one of the last round
        self._way = self._pace.way  # that of the last round, or of the next one
        self._context = 0.0  # tokens of a sequence of the last round
        self._looked = 0.0  # seconds that it took to look back
        self._promised = math.inf  # times what is predicted without drafts that the look-up promised
        self._plain = 0.0  # predicted seconds of a token of the last round, if nothing is drafted
        self._predicted = 0.0  # seconds of the last round: of its draft, as measured, and of its passes
        self._rounds = _Rounds()
        self._calm = 0.0  # tokens of each sequence before the rounds are taken in
        self._overheads: defaultdict[int, Overhead] = defaultdict(Overhead)  # like the paces
        self._beside = 0.0  # seconds that the round takes beside what is predicted
        self._slower = 1.0  # times what is predicted that a draft by the model takes

    @property
    def patient(self) -> bool:
        """Whether it drafts nothing in the next round."""
        return self._way == "none"

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; the drafter of an empty draft is "none"."""
        keys = sum(len(seq.tokens) for seq in seqs)
        self._plain, self._context = self._alone(len(seqs), keys), keys / len(seqs)
        pace = self._pace = self._pace_of(len(seqs))
        self._beside = self._overheads[len(seqs).bit_length()].drafting(len(seqs))
        self._looked = 0.0
        if pace.begins and pace.way != "none":
            self._look_back(seqs, keys)
        self._way = pace.way
        drafts = self._draft(seqs, lengths, keys) if self._way != "none" else []
        if self._way == "model" and all(draft.drafter != "model" for draft in drafts):
            pace.give_up(self._apart(len(seqs)))
            self._way = pace.way
        return [_NOTHING] * len(seqs) if self._way == "none" else drafts

    def timed(self, tokens: float, seconds: float, sequences: int) -> None:
        """Take in what a round of nothing but decoding gave, its time, and how many sequences there were."""
        rounds = self._rounds
        if sequences != rounds.sequences:
            self._take_in()
            rounds.clear(sequences)
            self._calm = 0.0
        if rounds.add(tokens, seconds) >= self._calm:
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the last rounds."""
        rounds = self._rounds
        tokens, sequences = rounds.tokens, rounds.sequences
        if not rounds.count:
            return
        pace = self._pace_of(sequences)
        if self._way == "none":
            self._plain = self._alone(sequences, self._context * sequences)
            self._predicted = tokens * self._plain
        seconds = rounds.seconds - self._looked
        beside = (seconds - self._predicted) / rounds.count
        self._overheads[sequences.bit_length()].learn(beside, drafting=self._way != "none")
        if pace is self._pace:
            pace.learn(tokens, seconds, tokens * self._plain, tokens / sequences)
        self._pace, self._way, self._looked = pace, pace.way, 0.0
        self._calm = min(pace.rest, _CALM) if self._way == "none" else 0.0
        self._context += tokens / sequences
        rounds.clear(sequences)

    def _pace_of(self, count: int) -> Pace:
        """That of so many sequences."""
        magnitude = count.bit_length()
        if magnitude not in self._paces:
            self._paces[magnitude] = Pace(self._ways, self._pace.best)
        return self._paces[magnitude]

    def _alone(self, count: int, keys: float) -> float:
        """Predicted seconds of a token if nothing is drafted."""
        return max(self._seconds(count, 1, keys), 1e-9) / count

    def _look_back(self, seqs: Sequence[Drafting], keys: int) -> None:
        """See how good a drafter would have been before it is tried; it may not be worth it, or too early to know."""
        started, pace, model = time.perf_counter(), self._pace, self._model
        some, counts = _generated(seqs, _LOOKED_UP)
        if sum(counts) < _ENOUGH:
            pace.put_off()
            return
        found = [self._ngram.look_back(seq, count) for seq, count in zip(some, counts, strict=True)]
        if sum(map(len, found)) >= _ENOUGH:
            self._promised = self._looked_up(found, len(seqs), keys) * self._plain
        if pace.way == "model" and model is not None:
            able = (seq for seq in sorted(seqs, key=model.behind) if model.room(seq) > 0)
            some, counts = _generated(able, _READ)
            self._by_model.doubt()
            self._by_model.learn(model.look_back(some, counts), sum(counts))
        elif self._promised < pace.speed("none"):
            self._looked = time.perf_counter() - started
            self._overheads[len(seqs).bit_length()].doubt()
            pace.give_up(self._apart(len(seqs)), _SOON)
        self._looked = time.perf_counter() - started

    def _apart(self, count: int) -> float:
        """Tokens of each of `count` sequences that lie between two looks back like the last one."""
        return self._looked / (_LOOKING * self._plain * count)

    def _looked_up(self, found: list[list[tuple[int, bool]]], count: int, keys: int) -> float:
        """Tokens per second that the look-up would have made for `count` sequences like these; learns from them."""
        for rate in self._by_match:
            rate.doubt()
        for matched, hit in chain.from_iterable(found):
            if matched:
                self._by_match[matched - 1].learn(int(hit), 1)
        self._speed = max(self._speed, 1 / self._plain)
        least, speeds = self._least(), []
        # Tokens that are drafted after a match, by its length; after none there is no draft.
        reach = [0, *(len(self._chances(matched + 1, _CAPS[-1], least)) for matched in range(len(self._by_match)))]
        for cap in _CAPS:
            rounds = drafted = 0
            for tokens in found:
                at = 0
                while at < len(tokens):
                    length = min(reach[tokens[at][0]], cap, len(tokens) - at - 1)
                    drafted += length
                    rounds += 1
                    end = at + length
                    while at < end and tokens[at][1]:
                        at += 1
                    at += 1
            each = count / rounds
            speeds.append(self._rate(each * sum(map(len, found)), each * (rounds + drafted), 1 + cap, keys, 0.0))
        return max(speeds)

    def _draft(self, seqs: Sequence[Drafting], lengths: list[int], keys: int) -> list[Draft]:
        """As `draft`; `keys` are the tokens of the sequences."""
        count = len(seqs)
        self._predicted = 0.0
        plain = 1 / (self._plain + self._beside / count)
        self._speed = max(self._speed, plain)
        least = self._least()
        found = []
        chances = []  # of each token of each draft: that it and all before it are accepted
        for seq, length in zip(seqs, lengths, strict=True):
            tokens, matched = self._ngram.look_up(
                seq, length if self._draft_tokens is None else min(length, self._draft_tokens)
            )
            self._matched[seq.slot] = matched
            found.append(tokens)
            chances.append(self._chances(matched, len(tokens), least))
        counts, gain, self._speed = [0] * count, 0.0, plain
        # Tiles are as wide as the longest draft, so long drafts are cut to the length that pays for all.
        for cap in range(1, max(map(len, chances)) + 1):
            gain += sum(chance[cap - 1] for chance in chances if len(chance) >= cap)
            cut = [min(len(chance), cap) for chance in chances]
            speed = self._rate(count + gain, count + sum(cut), 1 + max(cut), keys, 0.0)
            if speed > self._speed:
                counts, self._speed = cut, speed
        drafts = [Draft(tokens[:n], "ngram") if n else _NOTHING for tokens, n in zip(found, counts, strict=True)]
        if self._model is not None and self._way == "model":
            gains = [sum(chance[:n]) for chance, n in zip(chances, counts, strict=True)]
            self._draft_by_model(self._model, seqs, lengths, drafts, gains, keys)
        drafted = [len(draft.tokens) for draft in drafts]
        self._predicted += self._seconds(count + sum(drafted), 1 + max(drafted), keys)
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
        # At the beginning of a try the gain has to be one over rounds without drafts, too, as these were measured.
        fastest = max(self._speed, self._pace.speed("none") / self._plain if self._pace.begins else 0.0)
        best: dict[int, int] = {}
        expected = 0.0
        for most in self._choices:
            picks: dict[int, int] = {}
            tokens, read = count + sum(gains), 0.0
            cut = [len(d.tokens) for d in drafts]
            for i, rate in enumerate(rates):
                length = min(most, worthwhile[i])
                gain = expected_accepted(rate, length)
                if gain > gains[i]:
                    picks[i] = length
                    tokens += gain - gains[i]
                    cut[i] = length
                    # The tokens it has to read first also serve the sequence's later rounds.
                    read += model.behind(seqs[i]) * min((gain + 1) / lengths[i], 1.0)
            if picks:
                first = model.cost.predict(max(read, len(picks)), chosen=len(picks))
                drafting = first + (most - 1) * model.cost.predict(len(picks))
                speed = self._rate(tokens, count + sum(cut), 1 + max(cut), keys, drafting * self._slower)
                if speed > fastest:
                    best, fastest, expected = picks, speed, drafting
        if best:
            self._speed = fastest
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

    def _rate(self, tokens: float, rows: float, width: int, keys: float, drafting: float) -> float:
        """Tokens per second of a round.

        Args:
            tokens: expected committed tokens.
            rows: rows of its passes.
            width: those of the longest window.
            keys: tokens of the sequences.
            drafting: seconds taken to draft.
        """
        seconds = self._seconds(rows, width, keys) + drafting + self._beside
        return tokens / seconds if seconds else 0.0

    def _seconds(self, rows: float, width: int, keys: float) -> float:
        """Predicted seconds of a round's passes; arguments as above."""
        passes = math.ceil(rows / (self._most_rows // width * width))  # a window is not divided
        return passes * self._cost.predict(rows / passes, attention_area(rows, keys) / passes)


def _generated(seqs: Iterable[Drafting], most: int) -> tuple[list[Drafting], list[int]]:
    """The first sequences that have generated `most` tokens together, and how many of its last ones each gives."""
    some: list[Drafting] = []
    counts: list[int] = []
    for seq in seqs:
        if seq.generated and sum(counts) < most:
            some.append(seq)
            counts.append(min(seq.generated, _BACK))
    return some, counts


def make(parts: Parts) -> Drafter:
    """Make the drafter, with a look-up of its own."""
    return AutoDrafter(NgramDrafter(), parts.model, parts.target_cost, parts.most_rows, parts.draft_tokens)
