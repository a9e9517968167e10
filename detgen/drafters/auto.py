"""Picks, round by round, the drafter and the draft length that promise the most tokens per second.

The rule: among no drafts, look-up, the target itself and the draft model, and among lengths k, maximize

    sum over the sequences of (1 + expected accepted tokens) / (seconds to draft k tokens + seconds of the passes).

If each token is accepted with probability a, the expected number of accepted tokens of k is a + a^2 + ... + a^k
(Leviathan et al. 2023, arXiv 2211.17192). A sequence drafts fewer than k if the probability that the next token is
accepted is less than the cost of its row in seconds times the speed, which maximizes a ratio of sums (Dinkelbach 1967).

Two things are estimated:
- Acceptance, with a Beta prior. Each sequence has its own rate for tokens drafted by a model; the mean of its prior is
  the run's rate. The rates of look-up belong to the run, one for each length of the match before a token.
- Cost, as fitted by `PassCost`, times a factor per drafter: the median ratio of actual to predicted time.

A drafter that is not the best is tried again once the loss is a small share of the time since its last round. Looking
for drafts in vain may lose an equally small share: the time of the look-up, and that of several passes in one call.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul
from statistics import median
from typing import NamedTuple

from detgen.drafters.ngram import MOST_MATCHED, NgramDrafter
from detgen.drafters.passes import PassDrafter
from detgen.drafters.protocol import Draft, Drafter, Drafting, DraftPlan
from detgen.drafters.registry import Parts
from detgen.kernels.pass_cost import attention_area

_MOST = 8  # tokens of a draft, unless the user says how many
_PRIOR = 4.0  # weight of a prior, in tokens: Beta(2, 2) for the run, as much at the run's rate for a sequence
_MEMORY = 100.0  # tokens after which an observation counts 1/e in a rate of the run
_ROUNDS = 9  # the median is of so many ratios
# The share of the time that trying drafters again may lose, and the share that looking in vain may take, both of all
# drafters together.
_SHARE = 0.003
_NOTHING = Draft([], "none")


class Rate:
    """An estimate of how often a drafted token is accepted; `mean` is the mean of the posterior."""

    def __init__(self) -> None:
        self._hits, self._tries, self.mean = 0.0, 0.0, 0.5

    def learn(self, hits: int, tries: int) -> Rate:
        """Update the estimate: `hits` of `tries` tokens were accepted. Return self."""
        kept = (1 - 1 / _MEMORY) ** tries
        self._hits, self._tries = kept * self._hits + hits, kept * self._tries + tries
        self.mean = (self._hits + _PRIOR / 2) / (self._tries + _PRIOR)
        return self

    def own(self, hits: float, tries: float) -> float:
        """Return the mean for a sequence with `hits` accepted of `tries` tokens."""
        return (hits + _PRIOR * self.mean) / (tries + _PRIOR)


def best_counts(
    chances: Sequence[Sequence[float]], lengths: Sequence[int], seconds: Callable[[int, int], float], row: float
) -> tuple[float, list[int]]:
    """Return the highest speed in tokens per second and each sequence's draft length; 0 if there is nothing to draft.

    Args:
        chances: for each sequence, the probabilities that its first, second, ... token and all before it are accepted.
        lengths: the values of k, ascending.
        seconds: gives the time of a round from k and the total number of drafted tokens.
        row: seconds that one more drafted token costs; 0 if each sequence drafts as many as it can.
    """
    gains = [list(accumulate(own, initial=1.0)) for own in chances]
    most = [len(own) for own in chances]
    best, speed, before = [0] * len(chances), 0.0, -1.0
    while before < speed or before < 0:
        before = speed
        for k in lengths:
            counts = [min(n, k) for n in most]
            if drafted := sum(counts):
                found = sum([gain[n] for gain, n in zip(gains, counts, strict=True)]) / seconds(k, drafted)
                if found > speed:
                    speed, best = found, counts
            if max(most) <= k:
                break
        # Chances descend, so those that are worth their rows come first.
        most = [sum([chance > speed * row for chance in own]) for own in chances]
    return speed, best


class Plan(NamedTuple):
    """What a drafter would do in a round."""

    drafter: str
    speed: float  # tokens per second
    counts: list[int]  # tokens that each sequence drafts
    predicted: float  # seconds by the fitted cost, with all that a model reads first; for "none", of one pass
    loss: Callable[[float], float]  # seconds that it loses compared with a speed


class AutoDrafter(Drafter):
    """Drafts with the drafter that promises the most tokens per second, or always with one at its best lengths."""

    while_reading = False
    plans = True

    def __init__(self, parts: Parts, name: str = "auto") -> None:
        self.name, self._alone = name, name != "auto"
        self._ngram = NgramDrafter()
        self._models: dict[str, PassDrafter] = {m.name: m for m in (parts.own, parts.model) if m is not None}
        self._cost, self._most_rows = parts.target_cost, parts.most_rows
        self.draft_tokens: int = parts.draft_tokens or _MOST
        most = min(self.draft_tokens, parts.most_rows - 1)
        self._lengths = range(1, _MOST + 1) if parts.draft_tokens is None else (most,)
        self._by_model = {name: Rate() for name in self._models}
        self._by_match = [Rate() for _ in range(MOST_MATCHED + 1)]
        self._found: list[tuple[list[int], int]] = []  # by sequence: the tokens last looked up, the match's length
        self._matched: dict[int, int] = {}  # by slot, the length of the match before its draft
        self._ratios: dict[tuple[str, int], deque[float]] = {}  # by drafter and size of the round
        self._factors: dict[tuple[str, int] | str, float] = {}  # medians of the ratios; by drafter alone, the latest
        self._seconds, self._steps = 0.0, 1.0  # of all rounds; passes of the last round without drafts
        self._round: Plan | None = None
        self._in_vain: dict[str, float] = {}  # seconds of the last round spent on plans that were not taken
        self._last: defaultdict[str, float] = defaultdict(float)  # when each had its last round
        self._again = dict.fromkeys((name,) if self._alone else ("ngram", *self._models), 0.0)  # when to ask each
        self._share = _SHARE / len(self._again)

    def idle(self) -> bool:
        """Return whether nothing is drafted and it is too early to try again."""
        return not self._asked()

    def _asked(self) -> list[str]:
        """Return the drafters whose plans are due."""
        return [way for way, again in self._again.items() if self._alone or again <= self._seconds]

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i]; the drafter of an empty draft is "none"."""
        chosen, _ = self._choose(seqs, lengths)
        return self._drafts(chosen, seqs)

    def plan(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft] | DraftPlan:
        """See `Drafter.plan`; one that is only tried again drafts for one round."""
        chosen, best = self._choose(seqs, lengths)
        if not any(chosen.counts):
            return self._drafts(chosen, seqs)
        found = self._models.get(chosen.drafter, self._ngram).plan(seqs, chosen.counts)
        if isinstance(found, DraftPlan):
            wrote = found.wrote if found.runner else self._match
            return found._replace(nothing=_NOTHING.drafter, wrote=wrote, rounds=None if best else 1)
        return [draft if draft.tokens else _NOTHING for draft in found]

    def _match(self, seq: Drafting, draft: list[int]) -> None:
        """Note the length of the match before a draft that a device has looked up."""
        found, self._matched[seq.slot] = self._ngram.look_up(seq, len(draft))
        assert found == draft, "the device looks up what the host does"

    def _choose(self, seqs: Sequence[Drafting], lengths: list[int]) -> tuple[Plan, bool]:
        """Return the plan to follow in the next round, and whether it is the best."""
        now, keys = self._seconds, sum([len(seq.tokens) for seq in seqs])
        plans, took = [self._plain(len(seqs), keys)], {}
        for way in self._asked():
            started = time.perf_counter()
            plan = self._look_up(seqs, lengths, keys) if way == "ngram" else self._ask(way, seqs, lengths, keys)
            took[way] = time.perf_counter() - started
            if plan is not None:
                plans.append(plan)
        plans = (plans[1:] or plans) if self._alone else plans
        best = max(plans, key=lambda plan: plan.speed)
        due = [p for p in plans if p is not best and p.loss(best.speed) <= self._share * (now - self._last[p.drafter])]
        chosen = due[0] if due else best
        self._round = chosen if (model := self._models.get(chosen.drafter)) is None or model.ready else None
        self._last[chosen.drafter] = now
        self._in_vain = {way: s for way, s in took.items() if way not in (best.drafter, chosen.drafter)}
        for way, seconds in took.items():
            # The best drafter waits for one round at most: a round without drafts runs several passes if none is asked.
            wait = seconds if way == best.drafter else seconds / self._share
            self._again[way] = now if way == chosen.drafter else now + wait
        return chosen, chosen is best

    def timed(self, steps: float, seconds: float, sequences: int) -> None:
        """Learn from how long a round took, compared with the prediction."""
        self._seconds += seconds
        if (plan := self._round) is None or sequences != len(plan.counts):
            self._again = dict.fromkeys(self._again, 0.0) if sequences else self._again
            return
        key = plan.drafter, sequences.bit_length()
        if plan.drafter == "none":
            self._steps, seconds = steps, seconds / steps
            lost = seconds - sum(self._in_vain.values()) - plan.predicted * self._factor(*key) if steps == 1 else 0.0
            for way in self._in_vain:
                self._again[way] += min(max(lost, 0.0), plan.predicted) / self._share
        ratios = self._ratios.setdefault(key, deque([self._factor(*key)], _ROUNDS))
        ratios.append(seconds / plan.predicted)
        self._factors[key] = self._factors[plan.drafter] = median(ratios)

    def learn(self, seq: Drafting, drafter: str, accepted: int, tried: int) -> None:
        """Update the acceptance rates after a verified window."""
        if drafter in self._models:
            changed = self._models[drafter].changed_by(accepted, tried)
            self._by_model[drafter] = Rate() if changed else self._by_model[drafter].learn(accepted, tried)
        elif drafter == "ngram":
            for i in range(tried):
                self._by_match[min(self._matched[seq.slot] + i, MOST_MATCHED)].learn(int(i < accepted), 1)

    def _factor(self, drafter: str, size: int) -> float:
        """Return the ratio of actual to predicted time; that of the last round if none had this size."""
        return self._factors.get((drafter, size)) or self._factors.get(drafter, 1.0)

    def _passes(self, rows: int, width: int, keys: int) -> float:
        """Return the seconds of a round's canonical passes, given its rows, its longest window and the keys read."""
        passes = math.ceil(rows / (self._most_rows // width * width))  # a window is not divided
        return max(passes * self._cost.predict(rows / passes, attention_area(rows, keys) / passes), 1e-9)

    def _plain(self, count: int, keys: int) -> Plan:
        """Return the plan to draft nothing."""
        predicted = self._passes(count, 1, keys)
        seconds = predicted * self._factor("none", count.bit_length())
        return Plan("none", count / seconds, [0] * count, predicted, lambda at: self._steps * (seconds - count / at))

    def _look_up(self, seqs: Sequence[Drafting], lengths: list[int], keys: int) -> Plan | None:
        """Return the plan of look-up, whose drafts take hardly any time."""
        self._found = [self._ngram.look_up(seq, n) for seq, n in zip(seqs, lengths, strict=True)]
        means = [rate.mean for rate in self._by_match] + [self._by_match[-1].mean] * max(lengths)
        rates = [means[matched : matched + len(found)] for found, matched in self._found]
        return self._plan("ngram", [list(accumulate(own, mul)) for own in rates], keys, 0.0, 0.0, 0.0)

    def _ask(self, name: str, seqs: Sequence[Drafting], lengths: list[int], keys: int) -> Plan | None:
        """Return a model's plan. The cost of catching up is spread over the rest of each sequence."""
        model = self._models[name]
        chances, read, spread = [], 0.0, 0.0
        for seq, length in zip(seqs, lengths, strict=True):
            rate = self._by_model[name].own(*seq.acceptance.get(name, (0.0, 0.0)))
            chances.append(list(accumulate(repeat(rate, max(min(length, model.room(seq)), 0)), mul)))
            if chances[-1]:
                unread = model.unread(seq)
                read += unread
                spread += max(unread * min((1 + rate) / seq.remaining, 1.0), 1.0)
        there = sum(map(bool, chances))
        first, all_first = (model.seconds(rows, there) for rows in (spread, read))
        return self._plan(name, chances, keys, first, all_first, model.seconds(there, there))

    def _plan(self, drafter: str, chances: list[list[float]], keys: int, *drafting: float) -> Plan | None:
        """Return a drafter's best plan; `drafting`: seconds of its first pass, charged and in full, and of others."""
        count, (first, all_first, further) = len(chances), drafting
        factor = self._factor(drafter, count.bit_length())

        def seconds(k: int, drafted: int) -> float:
            return factor * (first + (k - 1) * further + self._passes(count + drafted, 1 + k, keys))

        row = factor * sum(self._cost.slopes()) if len(self._lengths) > 1 else 0.0
        speed, counts = best_counts(chances, self._lengths, seconds, row)
        total = (borne := seconds(max(counts), sum(counts))) + factor * (all_first - first)
        return Plan(drafter, speed, counts, total / factor, lambda at: total - speed * borne / at) if speed else None

    def _drafts(self, plan: Plan, seqs: Sequence[Drafting]) -> list[Draft]:
        """Draft according to a plan."""
        drafts = [_NOTHING] * len(seqs)
        going = [i for i, n in enumerate(plan.counts) if n]
        if plan.drafter in self._models:
            found = self._models[plan.drafter].draft([seqs[i] for i in going], [plan.counts[i] for i in going])
        else:
            found = [Draft(self._found[i][0][: plan.counts[i]], plan.drafter) for i in going]
            self._matched = {seqs[i].slot: self._found[i][1] for i in going}
        for i, draft in zip(going, found, strict=True):
            drafts[i] = draft if draft.tokens else _NOTHING
        return drafts


make = AutoDrafter
