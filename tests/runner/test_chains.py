"""Passes one after the other in one call give the bits of the same passes one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers.examples import examples, usual
from helpers.families import DESCRIBED, ROWS
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.input_batch import Ends, Window, Windows
from detgen.kernels.logprobs import Scores
from detgen.kernels.sampling import Choice, Choices, choose
from detgen.machine import CPU
from detgen.models.attaching import attach
from detgen.models.program_builder import ProgramBuilder
from detgen.program.arrays import FLOAT32, array, same_bits
from detgen.runner.block_manager import BlockManager
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner
from detgen.runner.state_cache import StateCache

VOCABULARY, SLOTS = 300, 4


@pytest.fixture(scope="module")
def forward() -> ModelRunner:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    layout = attach(model, "llama")
    cache = KVCache(layout.cached, BlockManager(2 * SLOTS), FLOAT32, CPU)
    cache.pages.lay_out(SLOTS, 128)
    return ModelRunner(CDecoder(ProgramBuilder(model, cache, layout.traits)), cache, layout.group)


def one_by_one(forward: ModelRunner, windows: Windows, lengths: list[int]) -> dict[tuple[int, int], tuple[int, ...]]:
    """What each row read and what its scores are, by window and step, from passes of their own."""
    found = {}
    going = dict(enumerate(windows))
    for step in range(max(lengths)):
        going = {i: w for i, w in going.items() if lengths[i] > step}
        if not going:
            break
        broken: list[int] = []
        scores = forward.run(list(going.values()), broken, scored=True)
        assert isinstance(scores, Scores)
        rows = np.cumsum([len(w.tokens) for w in going.values()]) - 1
        for at, (i, w) in enumerate(list(going.items())):
            finite = bool(scores.finite[at]) and rows[at] not in broken
            found[i, step] = (
                (w.tokens[-1], int(scores.tokens[at]), float(scores.leads[at]), float(scores.logprobs[at]))
                if finite
                else (w.tokens[-1],)
            )
            if finite:
                going[i] = Window(w.slot, w.start + len(w.tokens), [int(scores.tokens[at])], 1)
            else:
                del going[i]
    return found


@examples(30)
@given(data=st.data(), threads=st.integers(1, 3), spoiled=st.booleans())
def test_it_is_the_passes_one_by_one(forward: ModelRunner, data: st.DataObject, threads: int, spoiled: bool) -> None:
    """Tokens, scores and cache; sequences of any length, each as far as it is asked; one that is not finite stops."""
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
    reads = [data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=70)) for _ in slots]
    lengths = [data.draw(st.integers(1, 6)) for _ in slots]
    windows = Windows.of(Window(slot, 0, tokens, 1) for slot, tokens in zip(slots, reads, strict=True))
    entries = [*forward.cache.keys, *forward.cache.values]
    torch.set_num_threads(threads)
    model = forward.decoder
    assert isinstance(model, CDecoder)
    token = data.draw(st.integers(0, VOCABULARY - 1) | st.sampled_from([read[-1] for read in reads]))
    kept = model._programs._embedding[token].copy()
    if spoiled:
        model._programs._embedding[token, 0] = np.nan
    results = []
    for at_once in (False, True):
        for part in entries:
            part[:] = 0
        before = forward.passes, forward.rows
        if at_once:
            asked = np.array(lengths)
            tokens, scores, _ = forward.chain(windows, asked)
            step = np.arange(len(tokens)) - np.repeat(asked.cumsum() - asked, asked)
            owner = np.repeat(np.arange(len(asked)), asked)
            rows = zip(tokens.tolist(), *(x.tolist() for x in scores[:3]), scores.finite.tolist(), strict=True)
            made = {
                at: row[:4] if row[4] else row[:1]
                for at, row in zip(zip(owner.tolist(), step.tolist(), strict=True), rows, strict=True)
            }
        else:
            made = one_by_one(forward, windows, lengths)
        counted = forward.passes - before[0], forward.rows - before[1]
        results.append(((made, counted), [part.copy() for part in entries]))
    model._programs._embedding[token] = kept
    assert results[0][0] == results[1][0]
    assert all(same_bits(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@examples(30)
@given(data=st.data())
def test_drafts_are_what_sampling_chooses(forward: ModelRunner, data: st.DataObject) -> None:
    """At any temperature and with any filters, also beside greedy sequences."""
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
    reads = [data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=70)) for _ in slots]
    lengths = [data.draw(st.integers(1, 6)) for _ in slots]
    choices = [
        Choice(
            temperature=data.draw(st.sampled_from([0.0, 0.3, 0.8, 2.0])),
            top_k=data.draw(st.sampled_from([0, 1, 20])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            min_p=data.draw(st.sampled_from([0.0, 0.05])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            sample=data.draw(st.integers(0, 3)),
            position=data.draw(st.integers(0, 90)),
        )
        for _ in slots
    ]
    asked = np.array(lengths)
    before = forward.passes
    drafts = forward.draft(Windows.of(map(Window, slots, [0] * 9, reads, [1] * 9)), asked, choices)
    assert forward.passes - before == max(lengths)
    assert asked.tolist() == lengths
    for slot, read, length, choice, draft in zip(slots, reads, lengths, choices, drafts, strict=True):
        start, wanted = 0, []
        for ahead in range(length):
            logits = forward.run([Window(slot, start, read, 1)])
            start, now = start + len(read), replace(choice, position=choice.position + ahead)
            read = choose(logits, [now]).tokens.tolist()
            wanted += read
        assert draft == wanted


@examples(20)
@given(data=st.data(), threads=st.integers(1, 3))
def test_sampled_rows_are_those_of_passes_one_by_one(forward: ModelRunner, data: st.DataObject, threads: int) -> None:
    """Logits and cache to the bit, for sequences that end early, too; what is not finite is named."""
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
    reads = [data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=70)) for _ in slots]
    lengths = np.array([data.draw(st.integers(1, 6)) for _ in slots])
    seed = data.draw(st.integers(0, 2**32))
    choices = [Choice(temperature=1.0, seed=seed, sample=i) for i in range(len(slots))]
    windows = Windows.of(map(Window, slots, [0] * 9, reads, [1] * 9))
    ending = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=60))
    ends = Ends(np.array(ending, np.int64), np.array([data.draw(st.booleans()) for _ in slots]))
    torch.set_num_threads(threads)
    model = forward.decoder
    assert isinstance(model, CDecoder)
    token = data.draw(st.integers(0, VOCABULARY - 1))
    kept = model._programs._embedding[token].copy()
    if data.draw(st.booleans()):
        model._programs._embedding[token, 0] = np.nan
    asked = lengths.copy()
    read, logits, broken = forward.sample(windows, asked, Choices.of(choices), ends)
    assert (asked <= lengths).all()
    assert len(read) == len(logits) == asked.sum()
    entries = [part.copy() for part in (*forward.cache.keys, *forward.cache.values)]
    at = 0
    for i, window in enumerate(windows):
        for step in range(int(asked[i])):
            found: list[int] = []
            one = forward.run([window], found)
            assert read[at] == window.tokens[-1]
            assert same_bits(one[0], logits[at])
            assert (at in broken) == (len(window.tokens) - 1 in found)
            chosen = int(choose(one, [replace(choices[i], position=step)]).tokens[0])
            over = at in broken or not np.isfinite(one[0]).all() or (chosen in ending and ends.to_end[i])
            assert (step + 1 == asked[i]) == (over or step + 1 == lengths[i])
            window = Window(window.slot, window.start + len(window.tokens), [chosen], 1)
            at += 1
    model._programs._embedding[token] = kept
    assert all(same_bits(a, b) for a, b in zip(entries, (*forward.cache.keys, *forward.cache.values), strict=True))


def test_a_draft_ends_where_logits_are_not_finite(forward: ModelRunner) -> None:
    model = forward.decoder
    assert isinstance(model, CDecoder)
    choices = [Choice(temperature=0.8, seed=3)]
    (draft,) = forward.draft(Windows.of([Window(0, 0, [5, 6], 1)]), np.array([4]), choices)
    kept = model._programs._embedding[draft[1]].copy()
    model._programs._embedding[draft[1], 0] = np.nan
    lengths = np.array([4])
    (cut,) = forward.draft(Windows.of([Window(0, 0, [5, 6], 1)]), lengths, choices)
    model._programs._embedding[draft[1]] = kept
    assert cut == draft[: len(cut)]
    assert (len(cut), lengths.tolist()) == (draft.index(draft[1]) + 1, [draft.index(draft[1]) + 2])


def test_a_sequence_ends_with_its_token(forward: ModelRunner) -> None:
    """Where it is to end; what comes before is as without an end."""
    windows = Windows.of([Window(0, 0, [5, 6], 1), Window(1, 0, [5, 6], 1)])
    whole, scores, _ = forward.chain(windows, np.array([6, 6]))
    written = scores.tokens[:6].tolist()
    at = written.index(written[2])
    lengths, before = np.array([6, 6]), forward.passes
    ends = Ends(np.array([299 - written[0], written[2]]), np.array([True, False]))
    tokens, scores, _ = forward.chain(windows, lengths, ends)
    assert lengths.tolist() == [at + 1, 6]
    assert scores.tokens.tolist() == [*written[: at + 1], *written]
    assert tokens.tolist() == [*whole[: at + 1].tolist(), *whole[6:].tolist()]
    assert forward.passes == before + 6


def test_passes_that_nobody_needs_are_not_run(forward: ModelRunner) -> None:
    """Where all sequences stop early, the rest of the chain counts for nothing."""
    model = forward.decoder
    assert isinstance(model, CDecoder)
    kept = model._programs._embedding[5].copy()
    model._programs._embedding[5, 0] = np.nan
    before, lengths = forward.passes, np.array([4])
    tokens, scores, _ = forward.chain(Windows.of([Window(0, 0, [5], 1)]), lengths)
    model._programs._embedding[5] = kept
    assert (tokens.tolist(), scores.finite.tolist(), lengths.tolist()) == ([5], [False], [1])
    assert forward.passes == before + 1


@pytest.mark.parametrize("family", usual(["qwen3_5_text"], ["lfm2", "mamba", "mamba2", "falcon_h1"]))
def test_states_move_on(family: str) -> None:
    """Of a delta rule, of convolutions alone, of state spaces, and of one beside an attention."""
    results = []
    for at_once in (False, True):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config((DESCRIBED | ROWS)[family]()).eval()
        layout = attach(model, family)
        states = StateCache(layout.states, SLOTS, CPU)
        cache = KVCache(layout.cached, BlockManager(2 * SLOTS), FLOAT32, CPU, states)
        cache.pages.lay_out(SLOTS, 128)
        runner = ModelRunner(CDecoder(ProgramBuilder(model, cache, layout.traits)), cache, layout.group)
        runner.run([Window(slot, 0, list(range(5, 65 + slot)), 0) for slot in range(SLOTS)])
        windows = Windows.of([Window(3, 63, [9, 8, 7], 1), Window(0, 60, [4], 1), Window(1, 61, [6], 1)])
        lengths = np.array([4, 6, 1])
        if at_once:
            tokens, scores, _ = runner.chain(windows, lengths)
            rows = list(zip(tokens.tolist(), *(x.tolist() for x in scores[:3]), strict=True))
        else:
            found = one_by_one(runner, windows, lengths.tolist())
            rows = [found[i, step] for i, n in enumerate(lengths.tolist()) for step in range(n)]
        # Where each stands, and what the next pass makes of it, drafts included.
        after = [Window(2, 62, [3], 1), *(Window(s, int(states.at[s]), [3, 5], 2, drafted=1) for s in (3, 0, 1))]
        results.append((rows, states.at.tolist(), array(runner.run(after)), list(cache.keys), states.layers))
    (one, at, further, keys, kept), (other, reached, likewise, own, left) = results
    assert one == other
    assert at == reached
    assert at[3] == 63 + 3 + 3
    assert same_bits(further, likewise)
    assert all(same_bits(a, b) for a, b in zip(keys, own, strict=True))
    assert all(same_bits(a.state, b.state) for a, b in zip(kept, left, strict=True) if a is not None and b is not None)
