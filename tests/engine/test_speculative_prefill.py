"""A thinking model's outputs are a function of the request: however far its prompt is read ahead, whoever drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_inputs import adversary
from helpers.engines import Observed
from helpers.examples import examples, usual
from helpers.thinking_models import Thinks, random_model, save_model
from hypothesis import given
from hypothesis import strategies as st

from detgen import Engine, EngineError, Request, SamplingParams
from detgen.engine.output_processing import OutputProcessor
from detgen.engine.reading_ahead import ReadingAhead
from detgen.kernels.logprobs import Scores
from detgen.program.arrays import same_bits
from detgen.thinking.modeling import Reading

KINDS: dict[str, dict[str, Any]] = {
    "sometimes": {"thinks": "sometimes"},
    "zero": {"thinks": "sometimes", "empty_state": "zero", "seed": 4},
    "never": {"thinks": "never"},
    "always": {"thinks": "always", "seed": 2},
    "odd": {"thinks": "sometimes", "chunk_size": 5, "inject_layer": 0, "extract_layer": 1, "seed": 6},
    "qwen": {"thinks": "sometimes", "backbone": {"model_type": "qwen3"}, "inject_layer": 2, "extract_layer": 2},
}
NEW = 11


def _pool() -> dict[str, Request]:
    """Prompts of 1 to 200 tokens, some of which begin alike, some of which end with a chunk."""
    rng = random.Random(5)
    text = [rng.randrange(1, 4096) for _ in range(200)]
    prompts = [text[:n] for n in (1, 3, 4, 5, 40, 64, 131, 200)] + [[*text[:70], *text[:n]] for n in (2, 10, 61)]
    kinds: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"ignore_eos": True, "temperature": 0.9, "seed": 3, "n": 2},
        {"guided_regex": r"([a-z]{3} |\[[0-9], ){5}", "temperature": 0.9, "seed": 3},
    ]
    return {
        f"{i}-{j}": Request(i, f"{i}-{j}", token_ids=tuple(p), params=SamplingParams(max_tokens=NEW - i % 3, **kind))
        for i, p in enumerate(prompts)
        for j, kind in enumerate(kinds)
    }


POOL = _pool()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, demo_models: Any) -> Callable[[str], Path]:
    """Folders of the models."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp(kind), random_model(**KINDS[kind]), demo_models.target)
        return made[kind]

    return of


@pytest.fixture(scope="module")
def engines(folders: Callable[[str], Path]) -> Callable[..., Engine]:
    """Engines by kind and settings; the reference's models are prepared on their own."""
    prepared: dict[tuple[str, bool], Engine] = {}

    def make(kind: str, **settings: Any) -> Engine:
        alone = settings == REFERENCE
        if (kind, alone) not in prepared:
            prepared[kind, alone] = Engine(target=folders(kind), drafter="auto", kv_memory=8 << 20)
        return prepared[kind, alone].with_settings(**settings)

    return make


REFERENCE: dict[str, Any] = {
    "drafter": "none",
    "batch_size": 1,
    "prefix_cache": False,
    "speculative_prefill": "off",
}


@pytest.fixture(scope="module")
def reference(engines: Callable[..., Engine], observe: Callable[..., Any]) -> Callable[[str, str], Any]:
    """A request's samples read chunk by chunk, without drafts and neighbours."""
    found: dict[tuple[str, str], dict[Any, Observed]] = {}

    def of(kind: str, name: str) -> dict[Any, Observed]:
        if (kind, name) not in found:
            found[kind, name] = observe(engines(kind, **REFERENCE), [POOL[name]])
        return found[kind, name]

    return of


AHEAD = st.sampled_from(["auto", "off", 1, 3, 1000])


@examples(12)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    ahead=AHEAD,
    drafter=st.sampled_from(["none", "ngram", "self", adversary, "auto"]),
    window=st.sampled_from([1, 2, 3, 8]),
    batch=st.integers(1, 9),
    chunk=st.sampled_from([None, 1, 3, 7, 64]),
    prefix=st.booleans(),
    names=st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=9, unique=True),
    unverified=st.lists(st.sampled_from(sorted(POOL)), max_size=2, unique=True),
    pages=st.sampled_from([None, 8]),
)
def test_nothing_but_the_request_matters(
    engines: Callable[..., Engine],
    observe: Callable[..., Any],
    reference: Callable[[str, str], Any],
    kind: str,
    ahead: str | int,
    drafter: Any,
    window: int,
    batch: int,
    chunk: int | None,
    prefix: bool,
    names: list[str],
    unverified: list[str],
    pages: int | None,
) -> None:
    """Reading ahead, drafts, chunks, shared prefixes, preemption and neighbours leave every bit as it is."""
    settings: dict[str, Any] = {
        "drafter": drafter,
        "draft_tokens": window,
        "batch_size": batch,
        "prefill_chunk": chunk,
        "prefix_cache": prefix,
        "speculative_prefill": ahead,
    }
    engine = engines(kind, **settings)
    if pages is not None:
        engine = engine.with_settings(kv_memory=engine.position_bytes * 64 * pages)
    beside = [POOL[name].with_params(deterministic=False) for name in unverified if name not in names]
    found = observe(engine, [*beside, *(POOL[name] for name in names)])
    for name in names:
        for key, one in reference(kind, name).items():
            assert found[key].differs(one) is None, (key, settings)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_against_the_plain_algorithm(kind: str, engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """Tokens, thoughts, states and logits are those of `read`, but for rounding."""
    model, chunk = random_model(**KINDS[kind]), KINDS[kind].get("chunk_size", 4)
    for name in usual(["9-0"], ["0-0", "4-0", "7-0"]):
        (found,) = observe(engines(kind, drafter="ngram", batch_size=4), [POOL[name]]).values()
        done = found.completion
        prompt = POOL[name].token_ids or ()
        read: Reading = model.read([*prompt, *done.token_ids[:-1]])
        first = len(prompt) - 1
        torch.testing.assert_close(torch.cat(found.logits), read.logits[first:], atol=2e-3, rtol=1e-3)
        assert [(t.first, t.tokens) for t in done.thoughts] == [
            (i * chunk, thought) for i, thought in enumerate(read.thoughts) if thought
        ]
        torch.testing.assert_close(torch.stack(found.states), read.states, atol=2e-4, rtol=1e-3)


def _rounds(engine: Engine, name: str) -> tuple[int, int, int]:
    """Passes that read, thoughts and chunks of a prompt."""
    engine.reset_prefix_cache()
    stats = engine.stats
    before = stats.prefill_rounds
    (done,) = engine.generate([POOL[name].with_params(max_tokens=1)])
    chunks = len(POOL[name].token_ids or ()) // 4
    return stats.prefill_rounds - before, len(done.thoughts or ()), chunks


@pytest.mark.parametrize("kind", ["sometimes", "zero", "never", "always"])
@pytest.mark.parametrize("name", usual(["6-0"], ["3-0", "7-0"]))
def test_rounds(kind: str, name: str, engines: Callable[..., Engine]) -> None:
    """Reading all ahead takes a pass for each thought and one more; chunk by chunk, one for each chunk."""
    whole, thoughts, chunks = _rounds(engines(kind, speculative_prefill=1000, drafter="none"), name)
    assert whole <= thoughts + 1
    assert (thoughts == 0) == (kind == "never")
    single, same, _ = _rounds(engines(kind, speculative_prefill="off", drafter="none"), name)
    assert same == thoughts
    prompt = len(POOL[name].token_ids or ())
    assert single == -(-prompt // 4)
    some, _, _ = _rounds(engines(kind, drafter="none"), name)
    assert whole <= some <= single
    if kind == "always":
        assert whole == chunks + (prompt % 4 > 0)


def test_thoughts_are_those_of_whole_chunks(engines: Callable[..., Engine]) -> None:
    """Of prompt and completion alike, but for the last token, which no pass has read."""
    engine = engines("always", drafter="ngram")
    for prompt, new in ((3, 1), (3, 2), (4, 1), (4, 4), (4, 5), (64, 9)):
        tokens = (POOL["7-0"].token_ids or ())[:prompt]
        (done,) = engine.generate([list(tokens)], max_tokens=new, ignore_eos=True)
        assert done.thoughts is not None
        assert [t.first for t in done.thoughts] == list(range(0, (prompt + new - 1) // 4 * 4, 4))
        assert all(len(t.tokens) == 5 for t in done.thoughts)
        assert all(t.text == engine.tokenizer.decode(t.tokens, skip_special_tokens=True) for t in done.thoughts)


def test_greedy_rows_make_no_logits(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are cut with their windows, and give the tokens that logits give."""
    engine = engines("sometimes", speculative_prefill=1000, drafter="ngram")
    if engine.canonical.decoder.chaining is None:
        pytest.skip("only the native pass tells scores without logits")
    greedy = [request for name, request in POOL.items() if name.endswith("-0")]
    engine.reset_prefix_cache()
    by_scores = engine.generate(greedy)
    kinds: set[type] = set()
    settle = ReadingAhead.settle

    def watched(self: ReadingAhead, live: Any, windows: Any, results: Any, *more: Any) -> Any:
        kinds.add(type(results))
        return settle(self, live, windows, results, *more)

    monkeypatch.setattr(ReadingAhead, "settle", watched)
    engine.reset_prefix_cache()
    assert engine.generate(greedy) == by_scores
    assert kinds == {Scores}
    kinds.clear()
    monkeypatch.setattr(OutputProcessor, "plain", lambda *_: False)
    engine.reset_prefix_cache()
    assert engine.generate(greedy) == by_scores
    assert kinds == {np.ndarray}


def test_prefixes_are_shared_with_their_thoughts(engines: Callable[..., Engine], observe: Callable[..., Any]) -> None:
    """A prompt that begins like one before it reads only what is new, from a whole chunk on."""
    for kind, chunk in (("sometimes", 4), ("odd", 5)):
        engine = engines(kind, drafter="none", batch_size=1)
        engine.reset_prefix_cache()
        text = POOL["7-0"].token_ids or ()
        read, reused = engine.stats.prompt_tokens, engine.stats.reused_tokens
        (one,) = observe(engine, [Request(0, "a", token_ids=text[:150], params=SamplingParams(max_tokens=2))]).values()
        assert engine.stats.prompt_tokens - read >= 150
        (two,) = observe(engine, [Request(0, "b", token_ids=text[:140], params=SamplingParams(max_tokens=2))]).values()
        assert engine.stats.reused_tokens - reused == 139 - 139 % chunk
        assert two.completion.thoughts[:2] == one.completion.thoughts[:2]
        for a, b in zip(one.states[: 140 // chunk], two.states, strict=False):
            assert same_bits(a, b)


def test_statistics(engines: Callable[..., Engine]) -> None:
    engine = engines("sometimes", drafter="none", batch_size=1, prefix_cache=False)
    stats = engine.stats
    (done,) = engine.generate([POOL["7-0"]])
    assert stats.chunks == (200 + len(done.token_ids) - 1) // 4
    assert stats.thoughts == len(done.thoughts or ())
    assert stats.prefill_rounds + stats.passes_saved == 50
    assert stats.passes_saved > 0


def test_drafts_end_with_their_chunk(engines: Callable[..., Engine]) -> None:
    """No window reaches beyond the chunk it begins in, and rows behind a rejected draft are computed again."""
    engine = engines("sometimes", drafter="ngram", batch_size=2, draft_tokens=8)
    (done,) = engine.generate([POOL["4-0"]])
    rounds: dict[int, list[int]] = {}
    for record in done.records:
        rounds.setdefault(record.round, []).append(40 + record.position)
    for places in rounds.values():
        assert {(p - 1) // 4 for p in places} == {(places[0] - 1) // 4}
    assert any(len(places) > 1 for places in rounds.values())
    assert [a[0] for a in rounds.values()] == sorted(a[0] for a in rounds.values())
    assert all(a[0] < b[0] for a, b in pairwise(rounds.values()))


def test_for_models_that_think(demo_models: Any) -> None:
    with pytest.raises(EngineError, match=r"--speculative-prefill is for models that think while they read, and .*"):
        Engine(demo_models.target, drafter="none", speculative_prefill=3)


def test_kinds_differ() -> None:
    """The models do what their names say."""
    text = list(POOL["7-0"].token_ids or ())
    shares: dict[Thinks, float] = {"never": 0, "always": 1}
    for thinks, share in shares.items():
        assert sum(map(bool, random_model(thinks).read(text).thoughts)) == share * 50
    assert 10 < sum(map(bool, random_model().read(text).thoughts)) < 40
