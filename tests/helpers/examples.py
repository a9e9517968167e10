"""How many examples a property is tried on, and how many members of a large family."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import hypothesis
import pytest

_Case = TypeVar("_Case")

_FACTOR = {"thorough": 1.0, "explore": 10.0}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 0.1)

THOROUGH = _FACTOR >= 1
# For a test that takes long, of what others test in another way: CI runs it.
thorough = pytest.mark.skipif(not THOROUGH, reason="only HYPOTHESIS_PROFILE=thorough runs it")


def examples(usual: int) -> hypothesis.settings:
    """That many in the profile `thorough`, which CI takes; ten times as many in `explore`, else a tenth.

    But at least two, as the first is the simplest.
    """
    return hypothesis.settings(max_examples=max(round(usual * _FACTOR), min(usual, 2)))


def usual(some: Iterable[_Case], rest: Iterable[_Case]) -> list[_Case]:
    """Those that have whatever can be in any; in the profiles `thorough` and `explore` the rest, too, behind them."""
    some = list(some)
    return [*some, *(case for case in rest if case not in some)] if THOROUGH else some
