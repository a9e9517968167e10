"""Which settings to try: each pair of values of two axes at least once, or at random.

A covering array of strength two, made greedily after Cohen, Dalal, Fredman and Patton, "The AETG system" (1997):
each new setting is the best of a few random ones, by the pairs that it adds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from detgen.verify.perturb.axes import Axis, Setting, Value, allowed

_CANDIDATES = 6
_SLOW = ("process", "quant")  # axes off whose first value a setting takes long
_SELDOM = "resumed"  # starts two processes: tried by one setting instead of in each pair
_SHARE = 0.05  # of random settings

_Pair = tuple[int, Value, int, Value]


def pairwise(axes: list[Axis], seed: int) -> list[Setting]:
    """Settings in which each pair of values that can stand together occurs; of resumed runs there is one, at random.

    Args:
        axes: what to combine.
        seed: the same one gives the same settings.
    """
    rng = random.Random(seed)
    pairs = _pairs(axes)
    left = set(pairs)
    found = []
    while left:
        i, x, j, y = first = rng.choice([pair for pair in pairs if pair in left])
        grown = [g for g in (_grow(axes, left, {i: x, j: y}, rng) for _ in range(_CANDIDATES)) if g is not None]
        if not grown:
            left.discard(first)
            continue
        best = max(grown, key=lambda values: len(_covered(values, left)))
        left -= _covered(best, left)
        found.append(_setting(axes, best))
    for k in (k for k, axis in enumerate(axes) if _SELDOM in axis.values):
        while (values := _grow(axes, set(), {k: _SELDOM}, rng)) is None:
            pass
        found.append(_setting(axes, values))
    return found


def _pairs(axes: list[Axis]) -> list[_Pair]:
    return [
        (i, x, j, y)
        for (i, a), (j, b) in combinations(enumerate(axes), 2)
        for x in a.values
        for y in b.values
        if _SELDOM not in (x, y) and allowed(a.name, x, b.name, y)
    ]


def _covered(values: dict[int, Value], left: set[_Pair]) -> set[_Pair]:
    pairs = {(i, values[i], j, values[j]) for i, j in combinations(sorted(values), 2)}
    return pairs & left


def _grow(axes: list[Axis], left: set[_Pair], first: dict[int, Value], rng: random.Random) -> dict[int, Value] | None:
    """A setting around the first values, axis by axis in random order; None if it came to a dead end."""
    values = dict(first)
    others = [k for k in range(len(axes)) if k not in values]
    rng.shuffle(others)
    others.sort(key=lambda k: axes[k].name in _SLOW)
    for k in others:
        fitting = [v for v in axes[k].values if v != _SELDOM and _fits(axes, values, k, v)]
        if not fitting:
            return None
        gains = [sum(((a, w, k, v) if a < k else (k, v, a, w)) in left for a, w in values.items()) for v in fitting]
        best = [v for v, gain in zip(fitting, gains, strict=True) if gain == max(gains)]
        # Another process or quantization takes longer: only where it adds a pair.
        values[k] = best[0] if axes[k].name in _SLOW else rng.choice(best)
    return values


def _fits(axes: list[Axis], values: dict[int, Value], k: int, value: Value) -> bool:
    return all(allowed(axes[a].name, w, axes[k].name, value) for a, w in values.items())


def _setting(axes: list[Axis], values: dict[int, Value]) -> Setting:
    chosen: dict[str, Any] = {axes[k].name: v for k, v in values.items()}
    return Setting(**chosen)


def at_random(axes: list[Axis], seed: int) -> Iterator[Setting]:
    """Settings without end, each value as likely as the next where it can stand; resumed runs are few."""
    rng = random.Random(seed)
    while True:
        values: dict[int, Value] = {}
        seldom = rng.random() < _SHARE
        for k in rng.sample(range(len(axes)), len(axes)):
            fitting = [v for v in axes[k].values if (seldom or v != _SELDOM) and _fits(axes, values, k, v)]
            if fitting:
                values[k] = rng.choice(fitting)
        if len(values) == len(axes):
            yield _setting(axes, values)
