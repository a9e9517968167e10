"""The decoder of CUDA, on a CPU: by PyTorch's operators, and by its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import torch.nn.functional as F
import transformers as hf
from helpers import small_models
from helpers.examples import examples
from helpers.small_models import made
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.bits import same_bits
from detgen.kernels.judging import Scores
from detgen.kernels.native.angles import powers, turns
from detgen.kernels.native.library import Ends
from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton.kernels import REFERENCE, TRITON, Kernels
from detgen.kernels.triton.sampling import choose_reference, unpack
from detgen.passes.adapter import attach
from detgen.passes.cuda_decoder import CudaDecoder, _turns, cuda_decoder
from detgen.passes.embedding import broken_embedding
from detgen.passes.exchange import Exchange
from detgen.passes.forward import Forward
from detgen.passes.hooks import told
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Window, Windows
from detgen.passes.pages import Pages
from detgen.passes.replaying import Calls

CPU = torch.device("cpu")
SIZES = small_models.SIZES | {"tie_word_embeddings": False}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama 3": lambda: hf.LlamaConfig(**SIZES | {"tie_word_embeddings": True}, rope_parameters=LLAMA3),
    "mistral, a window": lambda: hf.MistralConfig(**SIZES, sliding_window=20),
    "qwen2, biases": lambda: hf.Qwen2Config(**SIZES),
    "qwen3, norms of heads": lambda: hf.Qwen3Config(**SIZES, head_dim=32),
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def passes(model: Any, kernels: Kernels) -> Forward:
    layout = attach(model, "model")
    cache = KVCache(layout.cached, Pages(40), model.dtype, CPU)
    decoder = cuda_decoder(model, cache, layout.traits, kernels, Calls())
    assert isinstance(decoder, CudaDecoder)
    cache.pages.lay_out(6, 256)
    return Forward(decoder, cache, layout.group)


@torch.inference_mode()
def own(model: Any, tokens: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def drawn(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def read_in_parts(model: Any, kernels: Kernels, count: int) -> None:
    """Compares logits of so many tokens, read at once and in parts beside others, with the model's own."""
    tokens = drawn(count, 1)
    wanted = own(model, tokens)
    forward = passes(model, kernels)
    whole = forward.run([Window(2, 0, tokens, count)])
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    half = count // 2
    first = forward.run([Window(0, 0, drawn(3, 2), 1), Window(1, 0, tokens[:half], half)])[1:]
    rest = forward.run([Window(1, half, tokens[half:], count - half), Window(0, 3, [7], 1)])[:-1]
    torch.testing.assert_close(torch.cat([first, rest]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_models_own_forward(family: str) -> None:
    read_in_parts(made(FAMILIES[family]()), REFERENCE, 70)


@pytest.mark.parametrize("family", ["qwen2, biases", "qwen3, norms of heads"])
def test_its_kernels_make_the_models_own_forward(family: str) -> None:
    config = FAMILIES[family]()
    config.num_hidden_layers, config.sliding_window = 1, 5
    read_in_parts(made(config), TRITON, 7)


@pytest.mark.parametrize("first", [0, 130_000])
def test_angles_are_those_of_a_cpu(first: int) -> None:
    """Far into a context, too, where a product in float64 is another angle."""
    frequencies = 1 / powers(500_000.0, tuple(i / 64 for i in range(64)))
    wanted = turns(frequencies, 1.25, first, first + 100)
    found = _turns(torch.arange(first, first + 100), torch.from_numpy(frequencies), 1.25)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1.25 * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    model, tokens = made(hf.LlamaConfig(**SIZES), dtype), drawn(30, 1)
    wanted = own(model, tokens)
    found = passes(model, REFERENCE).run([Window(0, 0, tokens, 30)])
    assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.fixture(scope="module")
def forward() -> Forward:
    """All of Triton's kernels, the linear layer among them."""
    return passes(made(hf.LlamaConfig(**SIZES | {"num_hidden_layers": 1})), TRITON)


@examples(3)
@given(data=st.data())
def test_a_row_is_the_same_in_every_pass(forward: Forward, data: st.DataObject) -> None:
    """Alone, beside others, in a larger window; in a pass that is recorded, replayed, or neither."""
    tokens = drawn(12, 3)
    start = data.draw(st.integers(0, 11))
    forward.run([Window(1, 0, tokens[: start + 1], 0)])
    (alone,) = forward.run([Window(1, start, tokens[start : start + 1], 1)])
    entries = forward.cache.entries(1, start, start + 1)
    width = data.draw(st.integers(1, min(12 - start, 6)))
    others = [
        Window(slot, 0, drawn(data.draw(st.integers(1, 4)), slot), 1)
        for slot in data.draw(st.lists(st.sampled_from([0, 2, 3]), unique=True))
    ]
    windows = [*others, Window(1, start, tokens[start : start + width], width)]
    windows = data.draw(st.permutations(windows))
    found = forward.run(windows)
    at = sum(w.logits for w in windows[: next(i for i, w in enumerate(windows) if w.slot == 1)])
    assert same_bits(found[at], alone)
    again = forward.cache.entries(1, start, start + 1)
    assert all(same_bits(a, b) for a, b in zip(entries, again, strict=True))


def test_passes_are_recorded_at_their_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = passes(made(hf.LlamaConfig(**SIZES)), REFERENCE)
    model = forward.model
    assert isinstance(model, CudaDecoder)
    calls: list[str] = []
    compute, record = model._compute, model._replaying.record
    monkeypatch.setattr(model, "_compute", lambda *a: calls.append("computed") or compute(*a))

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        replay = record(work)
        calls.append("recorded")
        return lambda: calls.append("replayed") or replay()

    monkeypatch.setattr(model._replaying, "record", recorded)
    results = [forward.run([Window(0, i, [5 + i], 1)]) for i in range(4)]
    assert calls[:4] == ["computed", "computed", "computed", "recorded"]
    assert calls[4:] == ["replayed", "computed"] * 2
    with model.unrecorded():
        calls.clear()
        assert same_bits(forward.run([Window(0, 3, [8], 1)]), results[3])
        assert calls == ["computed"]
    forward.run([Window(0, 0, drawn(3, 1), 3)])  # of other shapes
    assert same_bits(forward.run([Window(0, 3, [8], 1)]).isfinite().all(), torch.tensor(True))


@pytest.fixture(scope="module")
def rowwise() -> Forward:
    return passes(made(hf.LlamaConfig(**SIZES)), REFERENCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_stand_in_do_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    """Without a probe, its linear layer keeps an order of its own."""
    x, weight = torch.randn(40, 96).to(dtype), torch.randn(64, 96).to(dtype)
    bias = torch.randn(64).to(dtype)
    whole = REFERENCE.linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=0.05, atol=0.05)
    for count in (1, 2, 7, 33):
        assert same_bits(REFERENCE.linear(x[:count].clone(), weight, bias), whole[:count])


@examples(20)
@given(data=st.data(), sampled=st.booleans(), spoiled=st.booleans())
def test_passes_are_launched_one_after_the_other(
    rowwise: Forward, data: st.DataObject, sampled: bool, spoiled: bool
) -> None:
    """What the same passes give one by one, to the bit; who ends, or is not finite, has no more rows."""
    forward = rowwise
    slots = data.draw(st.lists(st.integers(0, 4), min_size=1, unique=True))
    reads = [drawn(data.draw(st.integers(1, 9)), slot) for slot in slots]
    lengths = np.array([data.draw(st.integers(1, 6)) for _ in slots])
    windows = Windows.of(map(Window, slots, [0] * 9, reads, [1] * 9))
    choices = Choices.of([Choice(0.9 * (i % 3 > 0), 0.95, seed=slots[i], position=3 * i) for i in range(len(slots))])
    ends = Ends(np.array(data.draw(st.lists(st.integers(0, 299), max_size=60))), np.arange(len(slots)) % 2 > 0)
    asked = lengths.copy()
    broken = broken_embedding(forward.model, data.draw(st.integers(0, 299))) if spoiled else nullcontext()
    with broken:
        if sampled:
            read, scores, named = forward.sample(windows, asked, choices, ends)
            assert not named
        else:
            read, scores = forward.chain(windows, asked, ends)
        assert isinstance(scores, Scores)
        assert len(read) == len(scores.tokens) == asked.sum()
        spans = [(slot, 0, len(r) + n - 1) for slot, r, n in zip(slots, reads, asked, strict=True)]
        entries = [forward.cache.entries(*span) for span in spans]
        at = 0
        for i, window in enumerate(windows):
            for step in range(int(asked[i])):
                found: list[int] = []
                logits = forward.run([window], found)
                how = replace(choices[i], position=3 * i + step) if sampled else Choice()
                wanted = unpack(choose_reference(logits, Choices.of([how])))
                finite = bool(wanted.finite[0]) and len(window.tokens) - 1 not in found
                assert read[at] == window.tokens[-1]
                assert scores.finite[at] == finite
                if finite:
                    assert [x[at].tobytes() for x in scores[:3]] == [x[0].tobytes() for x in wanted[:3]]
                token = int(wanted.tokens[0])
                over = not finite or (token in ends.tokens and ends.to_end[i])
                assert (step + 1 == asked[i]) == (over or step + 1 == lengths[i])
                window = Window(window.slot, window.start + len(window.tokens), [max(token, 0)], 1)
                at += 1
        for span, kept in zip(spans, entries, strict=True):
            again = forward.cache.entries(*span)
            assert all(same_bits(a, b) for a, b in zip(kept, again, strict=True))


def test_a_draft_ends_where_logits_are_not_finite(rowwise: Forward) -> None:
    windows, choices = Windows.of([Window(0, 0, [5, 6], 1)]), [Choice(0.8, seed=3)]
    (draft,) = rowwise.draft(windows, np.array([20]), choices)
    assert len(draft) == 20
    with broken_embedding(rowwise.model, draft[1]):
        (cut,) = rowwise.draft(windows, np.array([20]), choices)
    assert cut == draft[: draft.index(draft[1]) + 1]


def test_drafts_are_launched_likewise(rowwise: Forward) -> None:
    windows = Windows.of([Window(0, 0, [5, 6], 1), Window(1, 0, [7], 1)])
    choices = [Choice(0.8, seed=3), Choice()]
    drafts = rowwise.draft(windows, np.array([4, 2]), choices)
    assert [len(draft) for draft in drafts] == [4, 2]
    _, scores, _ = rowwise.sample(windows, np.array([4, 2]), Choices.of(choices))
    assert isinstance(scores, Scores)
    assert [token for draft in drafts for token in draft] == scores.tokens.tolist()


def test_what_is_broken_is_named() -> None:
    forward = passes(made(hf.LlamaConfig(**SIZES)), REFERENCE)
    windows = [Window(0, 0, [1, 9, 2], 1), Window(1, 0, [3, 4], 1)]
    sound = forward.run(windows)
    for _ in range(3):
        broken: list[int] = []
        with broken_embedding(forward.model, 9):
            found = forward.run(windows, broken)
        assert broken[0] == 1
        assert 3 not in broken
        assert same_bits(found[1], sound[1])


def test_steps_are_seen() -> None:
    forward = passes(made(hf.LlamaConfig(**SIZES)), REFERENCE)
    for _ in range(3):
        seen: list[str] = []
        with told(forward.model, lambda name, output, seen=seen: seen.append(name)):
            forward.run([Window(0, 0, [1, 2], 1)])
        assert "layers.1.down_proj" in seen
        assert "lm_head" in seen


def test_states_are_added_and_taken() -> None:
    model = made(hf.LlamaConfig(**SIZES))
    forward = passes(model, REFERENCE)
    windows = [Window(0, 0, [1, 2, 3], 3)]
    plain = forward.run(windows)
    nothing = Exchange(1, 1, torch.zeros(3, 64))
    torch.testing.assert_close(forward.run(windows, exchange=nothing), plain)
    assert nothing.hidden is not None
    assert nothing.hidden.shape == (3, 64)
    something = Exchange(1, 0, torch.ones(3, 64))
    changed = forward.run(windows, exchange=something)
    assert (changed - plain).abs().max() > 1e-2
    assert something.hidden is not None
    assert same_bits(something.hidden, forward.model.embed_tokens.weight[[1, 2, 3]])  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.Gemma2Config(**SIZES, head_dim=16),
        lambda: hf.PhiConfig(**SIZES),
        lambda: hf.GraniteConfig(**SIZES, residual_multiplier=0.5),
        lambda: hf.MixtralConfig(**SIZES, num_local_experts=2),
        lambda: hf.LlamaConfig(**SIZES, hidden_act="gelu"),
        lambda: hf.LlamaConfig(**SIZES, mlp_bias=True),
    ],
    ids=["gemma 2", "phi", "granite", "mixtral", "another activation", "biases of the feed-forward"],
)
def test_others_keep_their_own_forward(config: Callable[[], Any]) -> None:
    model = made(config())
    layout = attach(model, "model")
    cache = KVCache(layout.cached, Pages(4), torch.float32, CPU)
    assert cuda_decoder(model, cache, layout.traits, REFERENCE, Calls()) is None
