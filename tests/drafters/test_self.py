"""The target drafts for itself: what it drafts by, that nothing provisional is ever read, and when copies are made."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.engine_inputs import PROMPTS, ids
from helpers.examples import usual
from safetensors.torch import load_file, save_file

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.drafters import self as own_drafts
from detgen.drafters.auto import AutoDrafter
from detgen.drafters.registry import Parts
from detgen.drafters.self import SelfDrafter
from detgen.errors import DEMO, DTypeName
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.decoder import Narrowed
from detgen.kernels.pass_cost import PassCost
from detgen.program.steps import Rotate
from detgen.runner import preparing

VOCABULARY = 50


def make(passes: Any) -> SelfDrafter:
    return SelfDrafter(passes, Narrowed(passes, lambda: False, 0.25, 1), PassCost(), VOCABULARY, 10_000)


def test_drafts_behind_what_the_target_has_read(predictable: Any, draftable: Callable[..., Any]) -> None:
    """Only the last committed token is read, whatever was accepted of the draft before."""
    rng = random.Random(4)
    drafter = make(predictable)
    seqs = [draftable(i, [rng.randrange(VOCABULARY) for _ in range(n)]) for i, n in enumerate((1, 5, 64, 200))]
    for accepted in (0, 3, 1, 5, 0):
        for seq in seqs:
            predictable.read(seq.slot, seq.tokens[:-1])  # the canonical pass of the round before
        predictable.passes.clear()
        drafts = [draft.tokens for draft in drafter.draft(seqs, [5, 0, 2, 5])]
        assert drafts == [seq.wanted(n) for seq, n in zip(seqs, (5, 0, 2, 5), strict=True)]
        assert [(w.start, w.tokens) for w in predictable.passes[0]] == [
            (len(seq.tokens) - 1, seq.tokens[-1:]) for seq in seqs if seq.slot != 1
        ]
        for seq, draft in zip(seqs, drafts, strict=True):
            seq.tokens += [*draft[:accepted], rng.randrange(VOCABULARY)]


def test_its_first_passes_say_nothing_of_their_cost(predictable: Any, draftable: Callable[..., Any]) -> None:
    """They read weights that were just made; until others are timed, the bytes that are read say it."""
    target = PassCost()
    target.update(1, 0.01)
    drafter = SelfDrafter(predictable, Narrowed(predictable, lambda: False, 0.25, 1), target, VOCABULARY, 10_000)
    seq = draftable(0, [1, 2, 3])
    predictable.read(0, seq.tokens[:-1])
    predictable.cost.update(1, 5.0)
    drafter.draft([seq], [2])
    assert drafter.seconds(1, 0) == pytest.approx(0.0025)
    drafter.runner.cost.update(1, 0.004)
    drafter.draft([seq], [2])
    assert drafter.seconds(1, 0) == pytest.approx(0.004)


REQUESTS = [
    Request(i, i, token_ids=ids(n, 3 + i), params=SamplingParams(max_tokens=24, temperature=temperature, seed=i, n=2))
    for i, (n, temperature) in enumerate([(4, 0.0), (60, 0.8), (130, 0.0), (64, 1.0), (1, 0.0)])
]
PENALIZED = Request(
    9, 9, token_ids=ids(30, 2), params=SamplingParams(max_tokens=20, repetition_penalty=1.3, logit_bias=((5, 2.0),))
)


@pytest.fixture(scope="module")
def base() -> Engine:
    return Engine(batch_size=4, kv_memory=64 << 20)


@pytest.mark.parametrize("draft_tokens", usual([None, 3], [1, 9]))
def test_no_bit_depends_on_it(base: Engine, observe: Callable[..., Any], draft_tokens: int | None) -> None:
    engine = base.with_settings(drafter="self", draft_tokens=draft_tokens)
    requests = [*REQUESTS, PENALIZED]
    found, want = observe(engine, requests), observe(base.with_settings(drafter="none", batch_size=1), requests)
    for key, one in want.items():
        assert found[key].differs(one) is None
    assert engine.stats.drafters["self"].acceptance > 0.5  # the embedded model, not just any


@pytest.mark.parametrize("dtype", usual(["bfloat16-tc25"], ["float32", "bfloat16"]))
def test_nor_in_other_formats(observe: Callable[..., Any], dtype: DTypeName) -> None:
    engine = Engine(batch_size=4, kv_memory=64 << 20, dtype=dtype, drafter="none")
    want, found = (observe(engine.with_settings(drafter=name), REQUESTS[:3]) for name in ("none", "self"))
    for key, one in want.items():
        assert found[key].differs(one) is None


def test_nor_when_copies_are_improved(observe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of texts, after the first tokens that were tried; later drafts are those of the new copies."""
    monkeypatch.setattr(own_drafts, "_ENOUGH", 5)
    monkeypatch.setattr(own_drafts, "_WORTH", 2.0)
    engine = Engine(batch_size=4, kv_memory=64 << 20, dtype="float32", drafter="none")
    narrowed = engine._prepared.narrowed
    assert narrowed is not None
    want, found = (observe(engine.with_settings(drafter=name), REQUESTS[:3]) for name in ("none", "self"))
    for key, one in want.items():
        assert found[key].differs(one) is None
    copies = narrowed.decoder._fewer._made  # type: ignore[attr-defined]
    assert sum(w.data.nbytes + w.scales.nbytes for _, w in copies.values()) == narrowed.copies
    assert not narrowed.improve()


def test_what_is_provisional_is_never_read(
    base: Engine, observe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft's entries become NaN before they are verified: every bit stays."""
    draft, poisoned = SelfDrafter.draft, 0

    def poisoning(self: SelfDrafter, seqs: Any, lengths: list[int]) -> Any:
        nonlocal poisoned
        drafts = draft(self, seqs, lengths)
        cache = self.runner.cache
        for seq, found in zip(seqs, drafts, strict=True):
            positions = np.arange(len(seq.tokens) - 1, len(seq.tokens) - 1 + len(found.tokens))
            table = cache.pages.tables[seq.slot]
            for keys, values in zip(cache.keys, cache.values, strict=True):
                keys[table[positions // 64], :, :, positions % 64] = np.nan
                values[table[positions // 64], :, positions % 64] = np.nan
            poisoned += len(positions)
        return drafts

    want = observe(base.with_settings(drafter="none", batch_size=1), REQUESTS)
    monkeypatch.setattr(SelfDrafter, "draft", poisoning)
    found = observe(base.with_settings(drafter="self", draft_tokens=6), REQUESTS)
    assert poisoned > 200
    for key, one in want.items():
        assert found[key].differs(one) is None


def test_copies_are_made_for_the_first_draft() -> None:
    """Not when the engine is made, not for requests that are not verified."""
    engine = Engine(batch_size=2, kv_memory=16 << 20, drafter="self", dtype="float32")
    assert engine._prepared.narrowed is not None
    copies = engine._prepared.narrowed.decoder._fewer._made  # type: ignore[attr-defined]
    engine.generate(PROMPTS, max_tokens=8, deterministic=False)
    assert not copies
    engine.generate(PROMPTS, max_tokens=8)
    assert copies
    first = sum(w.data.nbytes + w.scales.nbytes for _, w in copies.values())
    assert engine._prepared.narrowed.improve()
    assert not copies
    engine.generate(PROMPTS, max_tokens=8)
    better = sum(w.data.nbytes + w.scales.nbytes for _, w in copies.values())
    assert first < better == engine._prepared.narrowed.copies
    assert not engine._prepared.narrowed.improve(), "there are no better ones"


def test_copies_that_are_not_worth_it_are_improved(predictable: Any, draftable: Callable[..., Any]) -> None:
    """As soon as a hundred tokens say so; a good copy stays, and the best one, too. The new ones take time again."""
    there = [True]
    narrowed = Narrowed(predictable, lambda: bool(there and there.pop()), 0.25, 1)
    drafter = SelfDrafter(predictable, narrowed, PassCost(), VOCABULARY, 10_000)
    seq = draftable(0, [1, 2, 3])
    predictable.read(0, seq.tokens[:-1])
    drafter.draft([seq], [2])
    assert drafter.ready
    assert not any(drafter.changed_by(10, 11) for _ in range(30))
    assert there
    drafter = SelfDrafter(predictable, narrowed, PassCost(), VOCABULARY, 10_000)
    drafter.draft([seq], [2])
    assert [drafter.changed_by(8, 10) for _ in range(25)] == [False] * 9 + [True] + [False] * 15
    assert not drafter.ready
    predictable.cost.update(1, 5.0)
    drafter.draft([seq], [2])
    assert drafter.ready
    assert drafter.seconds(1, 0) != pytest.approx(5.0)


def test_what_was_known_of_older_copies_is_forgotten(predictable: Any, draftable: Callable[..., Any]) -> None:
    predictable.cost.update(1, 0.001)
    own = SelfDrafter(predictable, Narrowed(predictable, lambda: True, 0.25, 1), PassCost(), VOCABULARY, 10_000)
    auto = AutoDrafter(Parts(None, PassCost(), 128, None, own), "self")
    seq = draftable(0, [1, 2, 3])
    for _ in range(99):
        auto.learn(seq, "self", 0, 1)
    assert auto._by_model["self"].mean < 0.05
    auto.learn(seq, "self", 0, 1)
    assert auto._by_model["self"].mean == 0.5


def test_a_weight_that_cannot_be_quantized_stays(observe: Callable[..., Any], tmp_path: Path) -> None:
    """Its scale would be infinite in float16. That is no reason to end a run that goes on without drafts."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO / "target", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e9
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(target=folder, batch_size=2, kv_memory=16 << 20, drafter="none")
    want = observe(engine, REQUESTS[:2])
    found = observe(engine.with_settings(drafter="self"), REQUESTS[:2])
    for key, one in want.items():
        assert found[key].differs(one) is None


def test_long_texts_reach_angles_that_both_have(base: Engine) -> None:
    """What one decoder makes room for, the other takes up: none reads behind the end of older tables."""
    own, narrowed = base.canonical.decoder, base._prepared.narrowed
    assert isinstance(own, CDecoder)
    assert narrowed is not None
    assert isinstance(narrowed.decoder, CDecoder)
    for first, second in ((own, narrowed.decoder), (narrowed.decoder, own)):
        most = 2 * first._programs.reach(1)
        for decoder in (first, second):
            decoder._runner(None, 1, False)
        first._runner(None, most, False)
        tables = [step for step in second._runner(None, most, False).program.steps if isinstance(step, Rotate)]
        assert tables
        assert all(step.cosines is not None and len(step.cosines) >= most for step in tables)


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so; auto does without, and who asks for it alone gets an error."""
    said: list[str] = []
    observer: Any = SimpleNamespace(stage=lambda *_: None, message=said.append)
    monkeypatch.setattr(preparing, "room_beside", lambda *_: 1000)
    engine = Engine(batch_size=2, kv_memory=16 << 20, observer=observer)
    assert len(said) == 1
    assert said[0].startswith("no memory for embedded:target in fewer bits (")
    assert engine._prepared.narrowed is None
    assert engine.generate(PROMPTS, max_tokens=4)
    with pytest.raises(EngineError, match=r"drafter self needs a model .* and memory for a copy"):
        engine.with_settings(drafter="self")


def test_models_in_few_bits_do_not_draft_for_themselves() -> None:
    engine = Engine(batch_size=2, kv_memory=16 << 20, target_quant="q8")
    with pytest.raises(EngineError, match="drafter self needs a model"):
        engine.with_settings(drafter="self")
