"""What is tried: the order of the settings, and axes by the names that a user types."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from detgen.errors import CheckError
from detgen.verify.perturb.axes import QUANTS, Setting, make_axes
from detgen.verify.perturb.covering import pairwise
from detgen.verify.perturb.plan import QUICK, ordered, read_axes, select


@pytest.mark.parametrize("seed", range(4))
def test_order(seed: int) -> None:
    """Each process loads each model once, the other one while this one works; the run to be killed comes last."""
    axes = make_axes(has_draft=True, quants=QUANTS, processes=True, cores=2)
    pairs = pairwise(axes, seed)
    found = ordered(pairs, axes)
    assert Counter(found) == Counter(pairs)
    assert found[-1].process == "resumed"
    assert [quant for quant, _ in groupby(found[:-1], key=lambda s: s.quant)] == list(QUANTS)
    kinds = [s.process == "this" for s in found[:-1] if s.quant == "nf4"]
    assert kinds == sorted(kinds)
    assert 0 < sum(kinds) < len(kinds)


def test_order_without_processes() -> None:
    settings = [Setting(batch=n) for n in (8, 2, 3)]
    axes = make_axes(has_draft=True, quants=["none"], processes=False, cores=2)
    assert ordered(settings, axes) == settings


def test_axes_as_typed() -> None:
    assert read_axes(["batch", "draft-tokens", "prefix_cache"]) == ["batch", "draft_tokens", "prefix_cache"]
    with pytest.raises(CheckError, match=r"no axis 'bath-size'; the axes are batch, .*, draft-tokens, chunk, "):
        read_axes(["bath_size"])
    axes = make_axes(has_draft=True, quants=["none"], processes=False, cores=1)
    with pytest.raises(CheckError, match="the axis threads has only one value here"):
        select(axes, ["threads"], QUICK, 0)


def test_batches_are_no_larger_than_there_are_requests() -> None:
    for requests, batches in ((4, (1, 2, 3, "all")), (20, (1, 2, 3, 8, 16, "all")), (64, (1, 2, 3, 8, 16, 64, "all"))):
        axes = make_axes(has_draft=True, quants=["none"], processes=False, cores=2, requests=requests)
        assert axes[0].values == batches
        settings, _, _ = select(axes, ["slot"], QUICK, 0)
        assert all(s.batch in batches for s in settings)
