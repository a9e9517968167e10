"""The selection of settings: all pairs, none that contradicts itself, the same for a seed."""

from __future__ import annotations

from itertools import combinations, islice

import pytest

from detgen.verify.perturb.axes import QUANTS, Axis, Setting, allowed, alone, consistent, make_axes
from detgen.verify.perturb.covering import at_random, pairwise

AXES = make_axes(has_draft=True, quants=QUANTS, processes=True, cores=2)
THINKING = make_axes(has_draft=False, quants=["none"], processes=True, cores=2, thinks=True)


@pytest.mark.parametrize("axes", [AXES, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_each_pair_once(seed: int, axes: list[Axis]) -> None:
    """Every pair of values that can stand together occurs; a run is killed and resumed in one setting."""
    found = pairwise(axes, seed)
    for a, b in combinations(axes, 2):
        seen = {(getattr(s, a.name), getattr(s, b.name)) for s in found}
        wanted = {(x, y) for x in a.values for y in b.values if allowed(a.name, x, b.name, y)}
        assert {pair for pair in wanted if "resumed" not in pair} <= seen, (a.name, b.name)
    assert sum(s.process == "resumed" for s in found) == 1
    assert len(found) < 120
    assert all(consistent(s) for s in found)


def test_reading_ahead_is_an_axis_of_models_that_think() -> None:
    """Others are tried under the settings that they always were."""
    assert "speculative_prefill" in {axis.name for axis in THINKING}
    assert "speculative_prefill" not in {axis.name for axis in AXES}
    assert {s.speculative_prefill for s in pairwise(AXES, 0)} == {"off"}
    assert len(pairwise(AXES, 0)) == 85
    assert not consistent(Setting(speculative_prefill=3, chunk=1))
    assert consistent(Setting(speculative_prefill="whole", chunk=7, process="resumed").turned("chunk", None))
    assert str(Setting(speculative_prefill="whole")) == "speculative prefill whole prompt"


def test_seed() -> None:
    assert pairwise(AXES, 3) == pairwise(AXES, 3)
    assert pairwise(AXES, 3) != pairwise(AXES, 4)


def test_at_random() -> None:
    some = list(islice(at_random(AXES, 0), 1000))
    assert all(consistent(s) for s in some)
    assert len(set(some)) > 950
    assert 0 < sum(s.process == "resumed" for s in some) < 100
    assert some == list(islice(at_random(AXES, 0), 1000))


@pytest.mark.parametrize("axis", [*AXES, *(a for a in THINKING if a not in AXES)], ids=lambda a: a.name)
def test_alone(axis: object) -> None:
    """An axis by itself: each of its values, where it has an effect."""
    found = alone(axis)  # type: ignore[arg-type]
    assert {getattr(s, axis.name) for s in found} == set(axis.values)  # type: ignore[attr-defined]
    assert all(consistent(s) for s in found)


def test_contradictions() -> None:
    """Draft tokens need a drafter; chains have no drafts; a slot and preemption need a batch,
    preemption one without very long prompts; a resumed run can have what the command line has."""
    assert not consistent(Setting(draft_tokens=3))
    assert not consistent(Setting(slot=1))
    assert not consistent(Setting(preemption=True))
    assert not consistent(Setting(batch=2, preemption=True, neighbours="long"))
    assert consistent(Setting(batch=2, preemption=True))
    assert consistent(Setting(drafter="ngram", draft_tokens=4, batch=2, slot=1))
    assert not any(consistent(Setting(drafter=name, chains=True)) for name in ("auto", "ngram", "oracle"))
    assert consistent(Setting(batch=3, chains=True))
    resumed = Setting(process="resumed", batch=2)
    assert all(consistent(resumed.turned("prefix_cache", value)) for value in ("off", "cold"))
    changes = [("prefix_cache", "warm"), ("prefix_cache", "shared"), ("preemption", True), ("chunk", 7)]
    changes += [("drafter", "oracle"), ("neighbours", "broken"), ("chains", True)]
    assert not any(consistent(resumed.turned(axis, value)) for axis, value in changes)
    assert consistent(resumed.turned("threads", 1))


def test_said_in_words() -> None:
    assert str(Setting()) == "the reference"
    setting = Setting(batch=3, drafter="ngram", draft_tokens=2, threads=1, prefix_cache="warm", preemption=True)
    words = "batch size 3, drafter ngram, draft tokens 2, prefix cache warm, preemption on, threads 1"
    assert str(setting) == words
    assert Setting(sampling="stop", quant="nf4", batch=3).reference() == Setting(sampling="stop", quant="nf4")
