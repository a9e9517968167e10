"""The selection of settings: all pairs, none that contradicts itself, the same for a seed; and their order."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict
from itertools import combinations, groupby, islice

import pytest

from detgen.drafters.registry import DRAFTERS
from detgen.errors import CheckError
from detgen.verify.perturb.axes import QUANTS, Axes, Setting, alone, make_axes
from detgen.verify.perturb.axes import consistent as stand_together
from detgen.verify.perturb.selecting import at_random, ordered, pairwise, read_axes, select

AXES = make_axes(drafters=DRAFTERS, quants=QUANTS, processes=True, cores=2)
THINKING = make_axes(drafters=("none", "ngram", "auto"), quants=["none"], processes=True, cores=2, thinks=True)


SEEDS = (0, 2**40)  # each takes seconds


def consistent(setting: Setting) -> bool:
    return stand_together(asdict(setting))


@functools.cache
def pairs_of(*, thinking: bool, seed: int) -> list[Setting]:
    """What is selected, found once."""
    return pairwise(THINKING if thinking else AXES, seed)


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_pair_once(seed: int, thinking: bool) -> None:
    """Every pair of values that can stand together occurs; a run is killed and resumed in one setting."""
    axes: Axes = THINKING if thinking else AXES
    found = pairs_of(thinking=thinking, seed=seed)
    for a, b in combinations(axes, 2):
        seen = {(getattr(s, a), getattr(s, b)) for s in found}
        wanted = {(x, y) for x in axes[a] for y in axes[b] if stand_together({a: x, b: y})}
        assert {pair for pair in wanted if "resumed" not in pair} <= seen, (a, b)
    assert sum(s.process == "resumed" for s in found) == 1
    assert len(found) < 120
    assert all(consistent(s) for s in found)


def test_reading_ahead_is_an_axis_of_models_that_think() -> None:
    """Others are tried under the settings that they always were."""
    assert "speculative_prefill" in THINKING
    assert "speculative_prefill" not in AXES
    found = pairs_of(thinking=False, seed=0)
    assert {s.speculative_prefill for s in found} == {"off"}
    assert len(found) == 95
    assert not consistent(Setting(speculative_prefill=3, chunk=1))
    assert consistent(Setting(speculative_prefill="whole", chunk=7, process="resumed").turned("chunk", None))
    assert str(Setting(speculative_prefill="whole")) == "speculative prefill whole prompt"


def test_seed() -> None:
    found = [pairs_of(thinking=False, seed=seed) for seed in SEEDS]
    assert pairwise(AXES, SEEDS[0]) == found[0]
    assert found[0] != found[1]


def test_at_random() -> None:
    some = list(islice(at_random(AXES, 0), 1000))
    assert all(consistent(s) for s in some)
    assert len(set(some)) > 950
    assert 0 < sum(s.process == "resumed" for s in some) < 100
    assert some == list(islice(at_random(AXES, 0), 1000))


@pytest.mark.parametrize("axis", {**THINKING, **AXES})
def test_alone(axis: str) -> None:
    """An axis by itself: each of its values, where it has an effect."""
    values = {**THINKING, **AXES}[axis]
    found = alone(axis, values)
    assert {getattr(s, axis) for s in found} == set(values)
    assert all(consistent(s) for s in found)


def test_contradictions() -> None:
    """Draft tokens need a drafter; chains have no drafts but a model's; a slot and preemption need a batch,
    preemption one without very long prompts; a resumed run can have what the command line has."""
    assert not consistent(Setting(draft_tokens=3))
    assert not consistent(Setting(slot=1))
    assert not consistent(Setting(preemption=True))
    assert not consistent(Setting(batch=2, preemption=True, neighbours="long"))
    assert consistent(Setting(batch=2, preemption=True))
    assert consistent(Setting(drafter="ngram", draft_tokens=4, batch=2, slot=1))
    assert not any(consistent(Setting(drafter=name, chains=True)) for name in ("adversary", "ngram", "oracle"))
    assert all(consistent(Setting(drafter=name, chains=True)) for name in ("auto", "model", "self"))
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


@pytest.mark.parametrize("seed", SEEDS)
def test_order(seed: int) -> None:
    """Each process loads each model once, the other one while this one works; the run to be killed comes last."""
    pairs = pairs_of(thinking=False, seed=seed)
    found = ordered(pairs, AXES)
    assert Counter(found) == Counter(pairs)
    assert found[-1].process == "resumed"
    assert [quant for quant, _ in groupby(found[:-1], key=lambda s: s.quant)] == list(QUANTS)
    kinds = [s.process == "this" for s in found[:-1] if s.quant == "nf4"]
    assert kinds == sorted(kinds)
    assert 0 < sum(kinds) < len(kinds)


def test_order_without_processes() -> None:
    settings = [Setting(batch=n) for n in (8, 2, 3)]
    axes = make_axes(drafters=DRAFTERS, quants=["none"], processes=False, cores=2)
    assert ordered(settings, axes) == settings


def test_axes_as_typed() -> None:
    assert read_axes(["batch", "draft-tokens", "prefix_cache"]) == ["batch", "draft_tokens", "prefix_cache"]
    with pytest.raises(CheckError, match=r"no axis 'bath-size'; the axes are batch, .*, draft-tokens, chunk, "):
        read_axes(["bath_size"])
    axes = make_axes(drafters=DRAFTERS, quants=["none"], processes=False, cores=1)
    with pytest.raises(CheckError, match="the axis threads has only one value here"):
        select(axes, ["threads"], 0, 0)


def test_batches_are_no_larger_than_there_are_requests() -> None:
    for requests, batches in ((4, (1, 2, 3, "all")), (20, (1, 2, 3, 8, 16, "all")), (64, (1, 2, 3, 8, 16, 64, "all"))):
        axes = make_axes(drafters=DRAFTERS, quants=["none"], processes=False, cores=2, requests=requests)
        assert axes["batch"] == batches
        settings, _, _ = select(axes, ["slot"], 0, 0)
        assert all(s.batch in batches for s in settings)


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_broken_drafts_beside_broken_neighbours_come_first(thinking: bool) -> None:
    """Before any other quantization is loaded; it is one more than the settings that combine all pairs."""
    axes: Axes = THINKING if thinking else AXES
    seed = SEEDS[0]
    (first, *others), pairs, _ = select(axes, [], 0, seed)
    assert (first.neighbours, first.drafter, first.quant) == ("broken", "adversary", "none")
    assert others == ordered(pairs_of(thinking=thinking, seed=seed), axes)
    assert pairs == 1 + len(others)
