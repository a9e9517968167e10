"""A whole check: the order of the settings, and the time for an explanation."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from detgen.check.axes import Setting, make_axes
from detgen.check.covering import pairwise
from detgen.check.session import _explaining, ordered

QUANTS = ["none", "nf4", "int8"]


@pytest.mark.parametrize("seed", range(4))
def test_order(seed: int) -> None:
    """Each model is loaded once, by the second process too while the first still works; the run killed comes last."""
    axes = make_axes(has_draft=True, quants=QUANTS, processes=True, cores=2)
    pairs = pairwise(axes, seed)
    found = ordered(pairs, axes)
    assert Counter(found) == Counter(pairs)
    assert found[-1].process == "resumed"
    assert [quant for quant, _ in groupby(found, key=lambda s: s.quant)] == QUANTS
    kinds = [s.process == "this" for s in found[:-1] if s.quant == "nf4"]
    assert kinds == sorted(kinds)
    assert 0 < sum(kinds) < len(kinds)


def test_order_without_processes() -> None:
    settings = [Setting(batch=n) for n in (8, 2, 3)]
    axes = make_axes(has_draft=True, quants=["none"], processes=False, cores=2)
    assert ordered(settings, axes) == settings


def test_time_for_an_explanation() -> None:
    """What is left of the minute, some seconds at least, no more than a share of it; more where it is over anyway."""
    assert _explaining(10) == 20
    assert 5 < _explaining(35) < 15
    assert _explaining(43) == 5
    assert _explaining(300) == 20
