"""Select and order the settings to try: each pair of values of two axes at least once, or at random.

A covering array of strength two, built greedily after Cohen, Dalal, Fredman and Patton, "The AETG system" (1997):
each new setting is the one of a few random settings that adds most pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Set
from itertools import combinations, islice
from typing import Any

from detgen.errors import CheckError
from detgen.verify.perturb.axes import TITLES, Axes, Setting, Value, alone, consistent

_CANDIDATES = 6
_SLOW = ("process", "quant")  # axes on which all values but the first take long
_SELDOM = "resumed"  # starts two processes: tried by one setting instead of in each pair
_SHARE = 0.05  # share of random settings
# A pair that shows what no other does, tried first since it might otherwise come after all quantizations.
_FIRST = Setting(batch=3, neighbours="broken", drafter="adversary", draft_tokens=4)

_Pair = frozenset[tuple[str, Value]]


def read_axes(names: Iterable[str]) -> list[str]:
    """Turn names of axes as a user types them into fields of `Setting`.

    Raises:
        CheckError: if there is no such axis.
    """
    found = [name.replace("-", "_") for name in names]
    if unknown := [name for name in found if name not in TITLES]:
        names = ", ".join(TITLES).replace("_", "-")
        raise CheckError(f"there is no axis {unknown[0].replace('_', '-')!r}; the axes are {names}")
    return found


def select(axes: Axes, names: list[str], count: int, seed: int) -> tuple[list[Setting], int, Iterator[Setting]]:
    """Select settings to try.

    Args:
        axes: all axes.
        names: names of axes to change alone; if empty, all axes are combined.
        count: number of random settings after the pairwise ones.
        seed: seed of the selection.

    Returns:
        The settings in order, how many of them are pairwise, and an endless iterator of random ones.

    Raises:
        CheckError: if an axis has only one value.
    """
    more = at_random(axes, seed)
    if missing := [name for name in names if name not in axes]:
        raise CheckError(f"the axis {missing[0].replace('_', '-')} has only one value here")
    if names:
        batch = max((v for v in axes.get("batch", ()) if v in (2, 3, 8)), default=8)
        return ordered([s for name in axes if name in names for s in alone(name, axes[name], batch)], axes), 0, more
    pairs = ordered([_FIRST, *pairwise(axes, seed)], axes)
    return [*pairs, *ordered(list(islice(more, count)), axes)], len(pairs), more


def ordered(settings: list[Setting], axes: Axes) -> list[Setting]:
    """Sort settings so that none waits for a model to be loaded.

    They are grouped by quantization; in all groups but the first, settings for another process come first: it loads the
    next model while the others are tried. Resumed runs load their own models and come last.
    """
    quants = axes.get("quant", ("none",))

    def place(s: Setting) -> tuple[bool, int, bool]:
        return s.process == "resumed", quants.index(s.quant), s.quant != quants[0] and s.process == "this"

    return sorted(settings, key=place)


def pairwise(axes: Axes, seed: int) -> list[Setting]:
    """Return settings that cover each consistent pair of values; one, at random, is a resumed run.

    Args:
        axes: the axes to combine.
        seed: equal seeds give equal settings.
    """
    rng = random.Random(seed)
    pairs = [
        pair
        for (a, xs), (b, ys) in combinations(axes.items(), 2)
        for x in xs
        for y in ys
        if _SELDOM not in (x, y) and consistent(pair := {a: x, b: y})
    ]
    left = {frozenset(pair.items()) for pair in pairs}
    found = []
    while left:
        first = rng.choice([pair for pair in pairs if frozenset(pair.items()) in left])
        grown = [g for g in (_grow(axes, left, first, rng) for _ in range(_CANDIDATES)) if g is not None]
        if not grown:
            left.discard(frozenset(first.items()))
            continue
        best = max(grown, key=lambda values: len(_pairs_of(values) & left))
        left -= _pairs_of(best)
        found.append(Setting(**best))
    for name in (name for name, values in axes.items() if _SELDOM in values):
        while (values := _grow(axes, set(), {name: _SELDOM}, rng)) is None:
            pass
        found.append(Setting(**values))
    return found


def _pairs_of(values: dict[str, Any]) -> set[_Pair]:
    return {frozenset(pair) for pair in combinations(values.items(), 2)}


def _grow(axes: Axes, left: Set[_Pair], first: dict[str, Any], rng: random.Random) -> dict[str, Any] | None:
    """Extend the first values to a setting, axis by axis in random order; None if that reaches a dead end."""
    values = dict(first)
    others = [name for name in axes if name not in values]
    rng.shuffle(others)
    others.sort(key=lambda name: name in _SLOW)
    for name in others:
        fitting = [v for v in axes[name] if v != _SELDOM and consistent({**values, name: v})]
        if not fitting:
            return None
        gains = [sum(frozenset([(name, v), other]) in left for other in values.items()) for v in fitting]
        best = [v for v, gain in zip(fitting, gains, strict=True) if gain == max(gains)]
        # Another process or quantization takes longer, and chains keep no logits: chosen only if that adds a pair.
        values[name] = best[0] if name in (*_SLOW, "chains") else rng.choice(best)
    return values


def at_random(axes: Axes, seed: int) -> Iterator[Setting]:
    """Yield random settings without end, consistent values being equally likely; few are resumed runs."""
    rng = random.Random(seed)
    while True:
        values: dict[str, Any] = {}
        seldom = rng.random() < _SHARE
        for name in rng.sample(list(axes), len(axes)):
            fitting = [v for v in axes[name] if (seldom or v != _SELDOM) and consistent({**values, name: v})]
            if fitting:
                values[name] = rng.choice(fitting)
        if len(values) == len(axes):
            yield Setting(**values)
