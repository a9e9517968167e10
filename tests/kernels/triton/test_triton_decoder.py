"""The decoder of CUDA has the bits of the one on a CPU; without a GPU, its kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

import transformers as hf
from helpers import small_models
from helpers.examples import examples, thorough, usual
from helpers.families import DESCRIBED, ROWS
from helpers.small_models import made
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.c.quantizing import MADE, PAIRED, Form
from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Ends, Window, Windows, pack
from detgen.kernels.logprobs import Scores
from detgen.kernels.penalties import Adjuster, Penalties
from detgen.kernels.sampling import Choice, Choices, choose
from detgen.kernels.triton import shapes
from detgen.kernels.triton.replaying import replaying
from detgen.kernels.triton.sampling_kernels import choose_by, unpack
from detgen.kernels.triton.triton_decoder import TritonDecoder
from detgen.machine import CPU, Device
from detgen.models.attaching import attach
from detgen.models.program_builder import ProgramBuilder
from detgen.program.arrays import BFLOAT16, FLOAT32, array, same_bits, tensor
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner
from detgen.runner.preparing import _on_cuda
from detgen.runner.state_cache import StateCache

DEVICE = Device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = small_models.SIZES | {
    "vocab_size": 140, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
TINY = SIZES | {"num_hidden_layers": 1}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NETS = SIZES | {
    "head_dim": 16, "linear_conv_kernel_dim": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 4, "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GPT2 = {"vocab_size": 140, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama 3": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral, a window": lambda: hf.MistralConfig(**TINY, sliding_window=5),
    "qwen2, biases": lambda: hf.Qwen2Config(**TINY),
    "qwen3, norms of heads": lambda: hf.Qwen3Config(**TINY, head_dim=16),
    "qwen3, experts": lambda: hf.Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20
    ),
    "gemma2, caps": lambda: hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=5),
    "gemma3, two rotations": lambda: hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5),
    "gpt-oss, sinks": lambda: hf.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, num_local_experts=5, num_experts_per_tok=3
    ),
    "gpt2, positions": lambda: hf.GPT2Config(**GPT2),
    "cohere, in parallel": lambda: hf.CohereConfig(**TINY),
    "qwen3.5, delta rules": lambda: hf.Qwen3_5TextConfig(**NETS),
    "lfm2, convolutions": lambda: hf.Lfm2Config(**TINY, conv_L_cache=3, layer_types=["conv"]),
    "mamba2, a state space": lambda: hf.Mamba2Config(
        vocab_size=140, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=6, n_groups=2
    ),
    "mamba, a selective scan": lambda: hf.MambaConfig(
        vocab_size=140, hidden_size=16, num_hidden_layers=1, state_size=6, time_step_rank=5
    ),
    "granite, factors": lambda: hf.GraniteConfig(**TINY, residual_multiplier=0.3, embedding_multiplier=3.0),
}
# Together they have all kinds of steps, which tests of kernels try one by one with all that they can be told.
USUAL = (
    *("llama 3", "gemma3, two rotations", "gpt-oss, sinks", "gpt2, positions", "qwen3.5, delta rules"),
    *("lfm2, convolutions", "mamba2, a state space", "mamba, a selective scan"),
)


def both(config: Any, form: Form = "none", dtype: torch.dtype = torch.float32) -> list[ModelRunner]:
    """Passes of a random model by kernels in Triton, and by the compiled library."""
    found: list[ModelRunner] = []
    there = torch.device(str(DEVICE))
    for device in (DEVICE, CPU):
        model = made(config, dtype)
        layout = attach(model, "model")
        states = StateCache(layout.states, 2, device) if layout.states else None
        kind = BFLOAT16 if form in PAIRED else FLOAT32
        cache = KVCache(layout.cached, BlockManager(20), kind, device, states)
        cache.pages.lay_out(5, 128)
        decoder: Any = (
            CDecoder(ProgramBuilder(model, cache, layout.traits, form))
            if found
            else TritonDecoder(
                ProgramBuilder(model, cache, layout.traits, form, keep=lambda x: tensor(x).to(there)),
                cache.scratch,
                there,
                replaying(there),
            )
        )
        found.append(ModelRunner(decoder, cache, layout.group))
    return found


def drawn(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 140, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def read_by_both(config: Any, form: Form = "none", dtype: torch.dtype = torch.float32) -> None:
    """Compares logits and entries of passes of several windows, some of which go on where others ended."""
    passes = (
        [Window(0, 0, drawn(6, 2), 1), Window(1, 0, drawn(3, 1), 3)],
        [Window(1, 3, drawn(2, 3), 2), Window(0, 6, [7], 1), Window(2, 0, [9], 1)],
    )
    forwards = both(config, form, dtype)
    for windows in passes:
        found, wanted = (array(forward.run(windows)) for forward in forwards)
        assert np.isfinite(wanted).all()
        assert same_bits(found, wanted)
    for slot, count in ((0, 7), (1, 5), (2, 1)):
        mine, theirs = (forward.cache.entries(slot, 0, count) for forward in forwards)
        assert all(same_bits(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("family", usual(USUAL, FAMILIES))
def test_it_has_the_bits_of_a_cpu(family: str) -> None:
    read_by_both(FAMILIES[family]())


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in DESCRIBED | ROWS if family != "qwen2_5_vl"])
def test_every_family_has_them(family: str) -> None:
    """But for Qwen2.5-VL, whose text model is Qwen2's and no class of its own."""
    read_by_both((DESCRIBED | ROWS)[family]().get_text_config())


@pytest.mark.parametrize(
    ("form", "dtype"),
    usual(
        [("q8", torch.float32), ("tc25", torch.bfloat16)],
        [
            ("none", torch.bfloat16),
            *((form, torch.float32) for form in MADE),
            *((form, torch.bfloat16) for form in PAIRED),
        ],
    ),
)
def test_weights_in_fewer_bits(form: Form, dtype: torch.dtype) -> None:
    read_by_both(hf.LlamaConfig(**TINY | {"hidden_size": 32, "intermediate_size": 256}), form, dtype)


@pytest.mark.parametrize(
    ("form", "dtype"), usual([("q8", torch.float32)], [("none", torch.float32), ("tc25", torch.bfloat16)])
)
def test_latent_attention(form: Form, dtype: torch.dtype) -> None:
    """Weights that take queries to short vectors, and those back from them, are in fewer bits, too."""
    sizes = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 4, "qk_nope_head_dim": 32, "v_head_dim": 32}
    read_by_both(hf.DeepseekV3Config(**TINY | sizes | {"first_k_dense_replace": 1}), form, dtype)


@thorough
def test_states_move_on_once() -> None:
    """In passes that are recorded and replayed; rows of drafts that do not stand move none; more slots than there was
    room for."""
    forwards = both(hf.Qwen3_5TextConfig(**NETS))
    passes = [
        [Window(0, 0, drawn(5, 1), 1), Window(1, 0, drawn(2, 2), 1)],
        *([Window(0, at, [at, 9, 8], 3, 2), Window(1, at - 3, [at], 1)] for at in (5, 6, 8, 9)),
        [Window(0, 11, [3], 1), Window(3, 0, drawn(40, 3), 1), Window(1, 7, [4, 5], 2, 1)],
        [Window(0, 12, [3], 1), Window(3, 40, [1], 1), Window(1, 9, [6], 1)],
    ]
    for windows in passes:
        found, wanted = (array(forward.run(windows)) for forward in forwards)
        assert np.isfinite(wanted).all()
        assert same_bits(found, wanted)


def test_far_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of positions that were not there when passes of the same shape were recorded."""
    monkeypatch.setattr("detgen.models.step_parts._POSITIONS", 64)
    forwards = both(hf.LlamaConfig(**TINY))
    for at in (0, 1, 2, 70, 3):
        found, wanted = (array(forward.run([Window(0, at, [at], 1)])) for forward in forwards)
        assert same_bits(found, wanted)


@pytest.fixture(scope="module")
def forward() -> ModelRunner:
    return both(hf.LlamaConfig(**TINY))[0]


@examples(4)
@given(data=st.data())
def test_a_row_is_the_same_in_every_pass(forward: ModelRunner, data: st.DataObject) -> None:
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
    windows = data.draw(st.permutations([*others, Window(1, start, tokens[start : start + width], width)]))
    found = forward.run(windows)
    at = sum(w.logits for w in windows[: next(i for i, w in enumerate(windows) if w.slot == 1)])
    assert same_bits(found[at], alone)
    again = forward.cache.entries(1, start, start + 1)
    assert all(same_bits(a, b) for a, b in zip(entries, again, strict=True))


def test_passes_are_recorded_at_their_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = both(hf.LlamaConfig(**TINY))[0]
    model = forward.decoder
    assert isinstance(model, TritonDecoder)
    calls: list[str] = []
    compute, record = model._compute, model._replaying.record
    monkeypatch.setattr(model, "_compute", lambda *a: calls.append("computed") or compute(*a))

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        replay = record(work)
        calls.append("recorded")
        return lambda: calls.append("replayed") or replay()

    monkeypatch.setattr(model._replaying, "record", recorded)
    results = [forward.run([Window(0, i, [5 + i], 1)]) for i in range(4)]
    assert calls == ["computed", "computed", "recorded", *2 * ["replayed", "computed"]]
    calls.clear()
    with model.telling(lambda name, output: None):
        assert same_bits(forward.run([Window(0, 3, [8], 1)]), results[3])
    assert calls == ["computed"], "who looks into passes has them computed"


def test_contexts_of_any_length_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is room for the longest; and what is in the tables behind a short one is not read."""
    forward, other = both(hf.LlamaConfig(**TINY))
    model = forward.decoder
    assert isinstance(model, TritonDecoder)
    recorded: list[int] = []
    record = model._replaying.record
    monkeypatch.setattr(model._replaying, "record", lambda work: (recorded.append(1), record(work))[1])
    for at in (0, 1, 2, 319, 318, 3, 4, 317):
        if at == 319:  # more blocks than before
            for each in (forward, other):
                each.cache.pages.lay_out(2, 320)
                each.run([Window(1, 0, drawn(319, 5), 1)])
        slot = int(at > 64)
        found, wanted = (array(each.run([Window(slot, at, [at % 140], 1)])) for each in (forward, other))
        assert same_bits(found, wanted)
    assert len(recorded) == 2
    assert {key._replace(wanted=1) for key in model._shapes} == {(1, 1, 1, 0), (384, 1, 12, 0)}


@pytest.mark.parametrize(
    ("rows", "rung"), [(1, 1), (3, 4), (5, 6), (9, 12), (33, 48), (400, 512), (1600, 2048), (3000, 3000)]
)
def test_the_ladder(rows: int, rung: int) -> None:
    """A pass is padded by half its rows at most, from four on by far less than a power of two would take."""
    assert shapes._rung(rows) == rung


@pytest.mark.parametrize("longest", [1, 2])
def test_a_shape_has_as_many_pieces_as_rows_if_each_has_one_token(longest: int) -> None:
    """Attention launches one tile of each piece then."""
    for count in range(1, 200):
        lengths = [longest] + [1] * (count - 1)
        windows = Windows.of(Window(slot, 0, [1] * n, 1) for slot, n in enumerate(lengths))
        packed = pack(windows, np.zeros((count, 1), np.int64), 1)
        key = shapes.Key.of(packed, len(packed.by_pieces(2)[0]))
        assert count <= key.pieces <= key.rows
        assert (key.pieces == key.rows) == (longest == 1)


def test_passes_of_many_shapes_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is bounded, and buffers are those of the largest pass, whatever the mix of shapes."""
    monkeypatch.setattr("detgen.kernels.triton.triton_decoder._MOST_SHAPES", 5)
    forward = both(hf.LlamaConfig(**TINY))[0]
    model = forward.decoder
    assert isinstance(model, TritonDecoder)
    monkeypatch.setattr(model, "_compute", lambda *a: None)
    random, keys = np.random.default_rng(0), set()
    for _ in range(600):
        lengths = random.integers(1, 40, random.integers(1, 5))
        wanted = [int(random.integers(0, min(n, 3) + 1)) for n in lengths]
        forward.run([Window(slot, 0, [1] * n, k) for slot, (n, k) in enumerate(zip(lengths, wanted, strict=True))])
        keys |= set(model._shapes)
        assert len(model._shapes) <= 5
    assert len(keys) > 20
    rows, results = max(key.rows for key in keys), max(key.wanted for key in keys)
    assert model._memory.results.shape == (results, 140)
    assert len(model._memory.broken) == rows
    storages = {shape.results.untyped_storage().data_ptr() for shape in model._shapes.values()}
    assert storages == {model._memory.results.untyped_storage().data_ptr()}


def test_a_shape_that_was_forgotten_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was recorded before there was more memory is not replayed: its results are elsewhere."""
    monkeypatch.setattr("detgen.kernels.triton.triton_decoder._MOST_SHAPES", 2)
    forward, other = both(hf.LlamaConfig(**TINY))
    small, middle, large = ([Window(0, 0, drawn(n, n), n)] for n in (1, 2, 5))
    for windows in (small, small, large, small, small, middle, middle, small, large):
        assert same_bits(forward.run(windows), other.run(windows))


@examples(5)
@given(data=st.data(), sampled=st.booleans(), spoiled=st.booleans())
def test_passes_are_launched_one_after_the_other(
    forward: ModelRunner, data: st.DataObject, sampled: bool, spoiled: bool
) -> None:
    """What the same passes give one by one, to the bit; who ends, or is not finite, has no more rows.

    Prompts are read in chunks, from the first pass or a later one on; one of them may not end.
    """
    slots = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
    reads = [drawn(data.draw(st.integers(1, 5)), slot) for slot in slots]
    unending = data.draw(st.sampled_from([None, *slots]))
    passes: list[list[Window]] = [[] for _ in range(3)]
    for slot, read in zip(slots, reads, strict=True):
        step, at = data.draw(st.integers(0, 1)) if passes[0] else 0, 0
        while at < len(read):
            end = len(read) if step == 2 else data.draw(st.integers(at + 1, len(read)))
            passes[step].append(Window(slot, at, read[at:end], int(end == len(read) and slot != unending)))
            step, at = step + 1, end
    while not passes[-1]:
        passes.pop()
    begun = [(w.slot, step) for step, windows in enumerate(passes) for w in windows if w.logits]
    lengths = np.array([data.draw(st.integers(1, 3)) for _ in begun], np.int64)
    choices = Choices.of([Choice(0.9 * (i % 3 != 1), 0.95, seed=i, position=3 * i) for i in range(len(begun))])
    ends = Ends(np.array(data.draw(st.lists(st.integers(0, 139), max_size=60))), np.arange(len(begun)) % 2 > 0)
    asked = lengths.copy()
    first, *later = map(Windows.of, passes)
    before = forward.passes, forward.rows
    broken = forward.decoder.breaking(data.draw(st.integers(0, 139))) if spoiled else nullcontext()
    with broken:
        if sampled:
            read_again, scores, named = forward.sample(first, asked, choices, ends, later)
        else:
            read_again, scores, named = forward.chain(first, asked, ends, later)
        assert isinstance(scores, Scores)
        assert len(read_again) == len(scores.tokens) == asked.sum()
        last = max([len(passes), *(step + n for (_, step), n in zip(begun, lengths.tolist(), strict=True))])
        rows = sum(map(len, reads)) + int((lengths - 1).sum())
        assert (forward.passes - before[0], forward.rows - before[1]) == (last, rows)
        texts = dict(zip(slots, map(len, reads), strict=True))
        for (slot, _), n in zip(begun, asked.tolist(), strict=True):
            texts[slot] += n - 1
        entries = {slot: forward.cache.entries(slot, 0, count) for slot, count in texts.items()}
        wrong: list[int] = []
        others, final = 0, {}
        for windows in passes:
            for window in windows:
                found: list[int] = []
                final[window.slot] = forward.run([window], found), found
                wrong += [others + row for row in found if row < len(window.tokens) - window.logits]
                others += len(window.tokens) - window.logits
        assert named == wrong
        at = 0
        for i, (slot, _) in enumerate(begun):
            window = next(w for windows in passes for w in windows if w.slot == slot and w.logits)
            logits, found = final[slot]
            for step in range(int(asked[i])):
                how = replace(choices[i], position=3 * i + step) if sampled else Choice()
                wanted = unpack(choose_by(logits, Choices.of([how])).cpu())
                finite = bool(wanted.finite[0]) and len(window.tokens) - 1 not in found
                assert read_again[at] == window.tokens[-1]
                assert scores.finite[at] == finite
                if finite:
                    assert [x[at].tobytes() for x in scores[:3]] == [x[0].tobytes() for x in wanted[:3]]
                token = int(wanted.tokens[0])
                over = not finite or (token in ends.tokens and ends.to_end[i])
                assert (step + 1 == asked[i]) == (over or step + 1 == lengths[i])
                window = Window(window.slot, window.start + len(window.tokens), [max(token, 0)], 1)
                if step + 1 < asked[i]:
                    found = []
                    logits = forward.run([window], found)
                at += 1
        for slot, kept in entries.items():
            again = forward.cache.entries(slot, 0, texts[slot])
            assert all(same_bits(a, b) for a, b in zip(kept, again, strict=True))


def test_states_move_on_in_calls() -> None:
    """Of who goes on, who reads, and who begins in a slot beyond those there were; the next pass goes on."""
    forward, other = both(hf.Qwen3_5TextConfig(**NETS))
    first, later = [Window(0, 0, [5, 6], 1), Window(1, 0, [7] * 4, 0)], [Window(1, 4, [8, 9], 1), Window(3, 0, [1], 0)]
    _, scores, _ = forward.chain(Windows.of(first), np.array([3, 2]), None, [Windows.of(later)])
    of_0, of_1 = scores.tokens[:3].tolist(), scores.tokens[3:].tolist()
    after = [Window(0, 4, of_0[2:], 1), Window(1, 7, of_1[1:], 1), Window(3, 1, [2], 1)]
    last = [Window(0, 3, of_0[1:2], 1), Window(1, 6, of_1[:1], 1)]
    for windows in (first, [Window(0, 2, of_0[:1], 1), *later], last):
        other.run(windows)
    assert same_bits(*(array(runner.run(after)) for runner in (forward, other)))


def test_passes_behind_an_end_are_counted(forward: ModelRunner) -> None:
    """They run, and take their time."""
    before, lengths = (forward.passes, forward.rows), np.array([3, 2])
    windows = Windows.of([Window(0, 0, [5, 6], 1), Window(1, 0, [7], 1)])
    read, *_ = forward.chain(windows, lengths, Ends(np.arange(140), np.array([True, True])))
    assert lengths.tolist() == [1, 1]
    assert read.tolist() == [6, 7]
    assert (forward.passes, forward.rows) == (before[0] + 3, before[1] + 3 + 2 + 1)


def test_drafts_are_launched_likewise(forward: ModelRunner) -> None:
    windows = Windows.of([Window(0, 0, [5, 6], 1), Window(1, 0, [7], 1)])
    choices = [Choice(0.8, seed=3), Choice()]
    drafts = forward.draft(windows, np.array([3, 2]), choices)
    assert [len(draft) for draft in drafts] == [3, 2]
    _, scores, _ = forward.sample(windows, np.array([3, 2]), Choices.of(choices))
    assert isinstance(scores, Scores)
    assert [token for draft in drafts for token in draft] == scores.tokens.tolist()
    with forward.decoder.breaking(drafts[0][1]):  # a draft ends where logits are not finite
        cut, _ = forward.draft(windows, np.array([3, 2]), choices)
    assert cut == drafts[0][: drafts[0].index(drafts[0][1]) + 1]


def test_drafts_count_what_they_draft(forward: ModelRunner) -> None:
    """As an adjuster does token by token."""
    penalties = Penalties(repetition=1.5, frequency=60.0, bias=((9, 50.0),))  # one token comes at once, and not again
    adjuster, at, read, wanted = Adjuster(penalties, [5, 6]), 0, [5, 6], list[int]()
    (draft,) = forward.draft(
        Windows.of([Window(0, 0, read, 1)]), np.array([4]), [Choice(0.8, seed=3)], [adjuster.growing([])]
    )
    for position in range(4):
        how = Choice(0.8, seed=3, position=position, adjustment=adjuster.after(wanted))
        logits = forward.run([Window(0, at, read, 1)])
        at, read = at + len(read), [int(token) for token in choose(logits, [how]).tokens]
        wanted += read
    assert draft == wanted
    assert (draft.index(9), draft.count(9)) == (0, 1)


def test_what_is_broken_is_named() -> None:
    """The same rows as on a CPU, and the others keep their bits."""
    windows = [Window(0, 0, [1, 9, 2], 1), Window(1, 0, [3, 4], 1)]
    named = []
    for forward in both(hf.LlamaConfig(**SIZES)):
        sound, broken = forward.run(windows), list[int]()
        with forward.decoder.breaking(9):
            found = forward.run(windows, broken)
        assert same_bits(found[1], sound[1])
        named.append(broken)
    assert named[0] == named[1] == [1]


def test_steps_are_seen() -> None:
    """What each step gives is what it gives on a CPU."""
    seen: list[dict[str, Any]] = []
    for forward in both(hf.LlamaConfig(**TINY)):
        steps: dict[str, Any] = {}
        with forward.decoder.telling(lambda name, output, steps=steps: steps.update({name: array(output).copy()})):
            forward.run([Window(0, 0, [1, 2], 1)])
        seen.append(steps)
    assert seen[0].keys() == seen[1].keys()
    assert all(same_bits(x, seen[1][name]) for name, x in seen[0].items())
    assert "lm_head" in seen[0]


def test_states_are_added_and_taken() -> None:
    windows = [Window(0, 0, [1, 2, 3], 3)]
    given = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    results = []
    for forward in both(hf.LlamaConfig(**SIZES)):
        exchange = Exchange(1, 0, given.to(str(forward.device)))
        logits = forward.run(windows, exchange=exchange)
        assert exchange.hidden is not None
        results.append((logits, exchange.hidden, forward.run(windows)))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))
    assert not same_bits(results[0][0], results[0][2])


def test_a_model_without_a_description_is_refused() -> None:
    model = made(hf.OlmoConfig(**TINY, hidden_act="quick_gelu"))
    loaded: Any = SimpleNamespace(name="the model")
    with pytest.raises(EngineError, match=r"the model \(OlmoForCausalLM\) has no description yet, so CUDA .* --device"):
        _on_cuda(loaded, model, attach(model, "model"), BlockManager(1), Device("cuda"), FLOAT32)
