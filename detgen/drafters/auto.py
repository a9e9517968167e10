"""Chooses drafter and draft length for each sequence and round, from measured cost and acceptance.

The candidates are no draft, the n-gram look-up and the draft model. A draft token is worth its row of the canonical
pass while its chance of acceptance exceeds the row's cost times the speed so far.

The look-up drafts in rounds that promise to be faster than those without drafts were. How often it is right is learnt
from tokens that were generated without it, too. Where it finds nothing it is asked less and less often, and for some of
the sequences only, so that looking costs next to nothing. The draft model drafts if its gain over the look-up is worth
its passes; whether the run gets faster by it is found out by trying it, after it has read what was generated without
it, in one pass. The choice depends on timing; the output does not depend on the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from detgen.drafters.costs import Costs
from detgen.drafters.look_up import LookUp
from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.drafters.rate import Rate, expected_accepted
from detgen.drafters.registry import Parts
from detgen.drafters.rounds import Rounds, RoundsBySize
from detgen.drafters.worth import Worth
from detgen.kernels.pass_cost import PassCost

_MODEL_DRAFT_TOKENS = (1, 3, 6)
_MODEL_PRIOR = 0.67  # acceptance of the draft model, as long as nothing is known of it
_ADAPTIVE = 8  # most tokens of an adaptive draft
_BACK = 32  # tokens of a sequence that the draft model looks back at, at most
_ENOUGH = 8  # tokens of all sequences that it looks back at
_SOME = 8  # sequences that stand for all where nothing was drafted
_LOOKING, _READING = 0.003, 0.002  # shares of the time to look for drafts where there are none, and to read back
# Tokens of each sequence until drafts are looked for again, at most: after a round with drafts, and twice as many each
# time that none are found, up to those.
_OFTEN, _RARELY = 16, 256
_NOTHING = Draft([], "none")


@dataclass(slots=True)
class _Round:
    """The last round that was asked for.

    Attributes:
        known: what is known of such rounds.
        context: tokens of a sequence.
        plain: predicted seconds of a token if nothing is drafted.
        worth: what its tokens are worth.
        seconds: those of its draft, as measured, and of its passes, as predicted.
        promised: seconds of a token, as predicted for the look-up's drafts; 0 if the draft model drafts.
        before: its sequences and the tokens that they had; empty if nothing is drafted.
        read: seconds that the draft model took to look back.
    """

    known: Rounds
    context: float
    plain: float
    worth: Worth = field(default_factory=lambda: Worth(None))
    seconds: float = 0.0
    promised: float = 0.0
    before: list[tuple[Drafting, int]] = field(default_factory=list)
    read: float = 0.0


class AutoDrafter(Drafter):
    """Drafts by whatever makes the round fastest.

    Args:
        ngram: the look-up.
        model: the draft model, if there is one.
        target_cost: cost of canonical passes.
        most_rows: most rows of a canonical pass; a larger round takes several.
        draft_tokens: draft tokens per round; None adapts.
    """

    name = "auto"
    while_reading = False

    def __init__(
        self,
        ngram: NgramDrafter,
        model: ModelDrafter | None,
        target_cost: PassCost,
        most_rows: int,
        draft_tokens: int | None,
    ) -> None:
        self._look_up = LookUp(ngram)
        self._model = model
        self._costs = Costs(target_cost, most_rows)
        self.draft_tokens = draft_tokens or _ADAPTIVE
        self._draft_tokens = draft_tokens
        self._choices = _MODEL_DRAFT_TOKENS if draft_tokens is None else (draft_tokens,)
        self._by_model = Rate(_MODEL_PRIOR)
        self._slower = 1.0  # times what is predicted that a draft by the model takes
        ways = ("ngram",) if model is None else ("model", "ngram")
        self._rounds = RoundsBySize(ways)
        self._round = _Round(Rounds(ways), 0.0, 0.0)
        self._speed = 0.0  # tokens per second that the last round promised
        self._waiting = True  # whether requests wait
        self._turn = 0  # the first of the sequences that stood for all
        self._until = 0.0  # the time before which it is not asked
        self._readable = 0.0  # the time before which the draft model does not look back again
        self._pause = _OFTEN  # tokens of each sequence until drafts are looked for again, at most
        # Rounds without drafts that are not taken in yet: their tokens, seconds and number of sequences.
        self._tokens, self._took, self._sequences = 0, 0.0, 1

    def idle(self) -> bool:
        """Whether it is too early to look for drafts again."""
        return time.perf_counter() < self._until

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """At most lengths[i] tokens for seqs[i]; the drafter of an empty draft is "none"."""
        self._take_in()
        started, calm, count = time.perf_counter(), not self._round.before, len(seqs)
        keys, known = sum(len(seq.tokens) for seq in seqs), self._rounds.of(count)
        now = self._round = _Round(known, keys / count, self._costs.alone(count, keys))
        some = self._some(count) if calm else slice(None)
        if calm:
            self._look_up.look_back(seqs[some])
        if known.pace.begins:
            now.read = self._read_back(seqs)
        if known.known and (
            len(seqs[some]) == count or known.pace.way == "model" or self._promising(seqs, lengths, some)
        ):
            drafts = self._draft(seqs, lengths)
            if any(draft.tokens for draft in drafts):
                now.before = [(seq, len(seq.tokens)) for seq in seqs]
                self._until, self._pause = 0.0, _OFTEN
                return drafts
        ended = time.perf_counter()
        self._until = ended + min((ended - started - now.read) / _LOOKING, self._pause * count * now.plain)
        self._pause = min(2 * self._pause, _RARELY)
        return [_NOTHING] * count

    def timed(self, tokens: int, seconds: float, sequences: int, waiting: bool) -> None:
        """Take in what a round gave, and what it took."""
        self._waiting = waiting
        last = self._round
        if not last.before:
            if sequences != self._sequences:
                self._take_in()
            self._sequences = sequences
            self._tokens += tokens
            self._took += seconds
            return
        worth = last.worth.tokens([len(seq.tokens) - before for seq, before in last.before])
        seconds -= last.read
        if worth > 0:  # else those that the end waits for broke off
            if last.promised:
                last.known.kept.learn(worth / sequences, seconds, worth * last.promised)
            last.known.overhead.learn(seconds - last.seconds)
            last.known.learn_drafted(worth, seconds, worth * last.plain, sequences)

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Update the acceptance rates after a verified window."""
        if drafter == "model":
            self._by_model.learn(accepted, tried)
        elif drafter == "ngram":
            self._look_up.learn(seq, accepted, tried)

    def _take_in(self) -> None:
        """Learn from the last rounds without drafts."""
        tokens, seconds, sequences, last = self._tokens, self._took - self._round.read, self._sequences, self._round
        self._tokens, self._took = 0, 0.0
        if not tokens:
            return
        expected = tokens * self._costs.alone(sequences, last.context * sequences)
        self._rounds.of(sequences).learn_plain(tokens, seconds, expected, sequences)
        last.context += tokens / sequences
        last.read = 0.0

    def _some(self, count: int) -> slice:
        """Which of so many sequences stand for all."""
        self._turn = (self._turn + _SOME) % count if count > _SOME else 0
        return slice(self._turn, self._turn + _SOME)

    def _promising(self, seqs: Sequence[Drafting], lengths: list[int], some: slice) -> bool:
        """Whether drafts by the look-up make rounds faster in which all sequences are like some of them."""
        few = seqs[some]
        return any(self._plan(few, lengths[some], len(seqs) / len(few))[2])

    def _plan(
        self, seqs: Sequence[Drafting], lengths: list[int], times: float = 1.0
    ) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Drafts by the look-up, the chances of their tokens, and how many of them make the round fastest.

        Sets the speed that this promises, and what their tokens are worth.

        Args:
            seqs: sequences.
            lengths: most tokens of each.
            times: as many sequences in place of each are in the round.
        """
        now, count = self._round, len(seqs)
        keys = now.context * count * times
        worth = now.worth = Worth(None if self._waiting else [seq.remaining for seq in seqs])
        plain, kept = now.known.plain / now.plain, now.known.kept.value or 1.0
        least = self._least(max(self._speed, plain))
        most = lengths if self._draft_tokens is None else [min(n, self._draft_tokens) for n in lengths]
        found = [self._look_up.find(seq, n, least) for seq, n in zip(seqs, most, strict=True)]
        tokens, chances = [tokens for tokens, _ in found], [chances for _, chances in found]
        counts, gains, speed, best = [0] * count, [1.0] * count, plain, 0.0
        # Tiles are as wide as the longest draft, so long drafts are cut to the length that pays for all.
        for cap in range(1, max(map(len, chances)) + 1):
            gains = [g + c[cap - 1] if len(c) >= cap else g for g, c in zip(gains, chances, strict=True)]
            cut = [min(len(c), cap) for c in chances]
            promised = self._rate(times * worth.tokens(gains), times * (count + sum(cut)), 1 + max(cut), keys)
            best = max(best, promised)
            if kept * promised > speed:
                counts, speed = cut, kept * promised
        if best > plain and not any(counts):
            now.known.doubt()
        self._speed, now.promised = speed, kept / speed
        return tokens, chances, counts

    def _draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """The drafts of a round."""
        now, count = self._round, len(seqs)
        tokens, chances, counts = self._plan(seqs, lengths)
        drafts = [Draft(t[:n], "ngram") if n else _NOTHING for t, n in zip(tokens, counts, strict=True)]
        if self._model is not None and now.known.pace.way == "model":
            gains = [1 + sum(chance[:n]) for chance, n in zip(chances, counts, strict=True)]
            self._draft_by_model(self._model, seqs, lengths, drafts, gains)
            if now.promised:
                now.known.pace.give_up()
        drafted = [len(draft.tokens) for draft in drafts]
        now.seconds += self._costs.seconds(count + sum(drafted), 1 + max(drafted), now.context * count)
        return drafts

    def _draft_by_model(
        self,
        model: ModelDrafter,
        seqs: Sequence[Drafting],
        lengths: list[int],
        drafts: list[Draft],
        gains: list[float],
    ) -> None:
        """Replace drafts by those of the draft model if that makes the round faster; changes `drafts` in place.

        Args:
            model: the draft model.
            seqs: the sequences.
            lengths: most tokens of each.
            drafts: those of the look-up.
            gains: tokens that each sequence is expected to get by them.
        """
        now, count = self._round, len(seqs)
        rates = [self._acceptance(seq) for seq in seqs]
        least = math.log(self._least(self._speed))
        worthwhile = [min(n, int(least / math.log(rate))) for n, rate in zip(lengths, rates, strict=True)]
        best: dict[int, int] = {}
        expected = 0.0
        for most in self._choices:
            picks: dict[int, int] = {}
            more, read = list(gains), 0.0
            cut = [len(d.tokens) for d in drafts]
            for i, rate in enumerate(rates):
                length = min(most, worthwhile[i])
                gain = 1 + expected_accepted(rate, length)
                if gain > gains[i]:
                    picks[i] = cut[i] = length
                    more[i] = gain
                    # The tokens it has to read first also serve the sequence's later rounds.
                    read += model.behind(seqs[i]) * min(gain / lengths[i], 1.0)
            if picks:
                first = model.cost.predict(max(read, len(picks)), chosen=len(picks))
                drafting = first + (most - 1) * model.cost.predict(len(picks))
                keys, rows = now.context * count, count + sum(cut)
                speed = self._rate(now.worth.tokens(more), rows, 1 + max(cut), keys, drafting * self._slower)
                if speed > self._speed:
                    best, self._speed, expected = picks, speed, drafting
        if best:
            started = time.perf_counter()
            written = model.draft([seqs[i] for i in best], list(best.values()))
            now.seconds, now.promised = time.perf_counter() - started, 0.0
            self._slower = 0.9 * self._slower + 0.1 * min(now.seconds / expected, 4.0)
            for i, draft in zip(best, written, strict=True):
                drafts[i] = draft if draft.tokens else _NOTHING

    def _read_back(self, seqs: Sequence[Drafting]) -> float:
        """See how good the draft model would have been before it is tried; it may be too early to know.

        Returns:
            The seconds that it took.
        """
        started, model = time.perf_counter(), self._model
        assert model is not None
        able = (seq for seq in sorted(seqs, key=model.behind) if model.room(seq) > 0)
        some, counts = _generated(able, _ENOUGH)
        if sum(counts) < _ENOUGH or started < self._readable:
            self._round.known.pace.put_off()
            return 0.0
        self._by_model.doubt()
        self._by_model.learn(model.look_back(some, counts), sum(counts))
        ended = time.perf_counter()
        self._readable = ended + (ended - started) / _READING
        return ended - started

    def _acceptance(self, seq: Drafting) -> float:
        """Estimated acceptance of the draft model's tokens: the sequence's own, pulled towards the overall rate."""
        hits, tries = seq.acceptance.get("model", (0.0, 0.0))
        return min(max((hits + 2 * self._by_model.value) / (tries + 2), 0.02), 0.98)

    def _least(self, speed: float) -> float:
        """The chance above which a draft token gains more than its row costs, at a speed."""
        if self._draft_tokens is not None:
            return 1e-9  # the user set the length
        return min(max(speed * self._costs.row, 1e-3), 0.9)

    def _rate(self, tokens: float, rows: float, width: int, keys: float, drafting: float = 0.0) -> float:
        """Tokens per second of a round with drafts.

        Args:
            tokens: expected committed tokens.
            rows: rows of its passes.
            width: those of the longest window.
            keys: tokens of the sequences.
            drafting: seconds taken to draft.
        """
        seconds = self._costs.seconds(rows, width, keys) + drafting + self._round.known.overhead.seconds
        return tokens / seconds if seconds else 0.0


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
