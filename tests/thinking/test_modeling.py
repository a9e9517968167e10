"""The Thinking States model: parallel training against plain reading, its parts, causality, the loss."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.thinking_backbones import BACKBONES, ids_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from detgen.thinking.configuration import ThinkingStatesConfig
from detgen.thinking.modeling import IGNORED, Reading, ThinkingStatesForCausalLM


@cache
def model_of(kind: str = "mistral", seed: int = 0, **changed: Any) -> ThinkingStatesForCausalLM:
    """A model with random weights that thinks after some chunks, but not all."""
    torch.manual_seed(seed)
    config = ThinkingStatesConfig(BACKBONES[kind](), **{"max_thought_tokens": 5, **changed})
    model = ThinkingStatesForCausalLM(config).eval()
    with torch.no_grad():
        model.thinker.head.weight[0] *= 4  # ends of many lengths
    return model


def gold_of(thoughts: list[tuple[int, ...]]) -> torch.Tensor:
    gold = torch.full((1, len(thoughts), 1 + max(map(len, thoughts), default=0)), IGNORED)
    for chunk, thought in enumerate(thoughts):
        gold[0, chunk, : len(thought) + 1] = torch.tensor([*thought, 0])
    return gold


def read_anew(model: ThinkingStatesForCausalLM, ids: list[int]) -> Reading:
    """What `read` returns, computed from the whole beginning of the text for each chunk and thought, with no cache."""
    c, thoughts = model.config.chunk_size, list[tuple[int, ...]]()
    states = [torch.zeros(c, 16)]

    @torch.no_grad()
    def all_so_far(end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return model.decode(torch.tensor([ids[:end]]), torch.cat(states)[None, :end])

    for first in range(0, len(ids) - c + 1, c):
        rows = all_so_far(first + c)[1][:, first:]
        thought: list[int] = []
        while len(thought) < model.config.max_thought_tokens:
            with torch.no_grad():
                out = model._layer(model.thinker.layer, rows)
                token = int(model.thinker.head(model.thinker.norm(out[0, -1])).argmax())
                if token == 0:
                    break
                thought.append(token)
                rows = torch.cat([rows, model.get_input_embeddings()(torch.tensor([[token]]))], 1)
        thoughts.append(tuple(thought))
        state = states[-1] if model.config.empty_state == "keep" else torch.zeros(c, 16)
        if thought:
            with torch.no_grad():
                embedded = model.get_input_embeddings()(torch.tensor([[*thought, 0]]))
                made = model._layer(model.compressor.layer, embedded)[0][-c:]
            state = torch.cat([torch.zeros(c - len(made), 16), made])
        states.append(state)
    return Reading(ids, all_so_far(len(ids))[0][0], thoughts, torch.stack(states))


@examples(40)
@given(
    kind=st.sampled_from(sorted(BACKBONES)),
    chunk_size=st.integers(1, 6),
    layers=st.sampled_from([(0, -1), (1, -1), (1, 1), (2, 2), (0, 0)]),
    empty=st.sampled_from(["keep", "zero"]),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_forward_with_the_gold_thoughts_equals_read(
    kind: str, chunk_size: int, layers: tuple[int, int], empty: str, length: int, seed: int
) -> None:
    inject, extract = layers
    changed = {"chunk_size": chunk_size, "inject_layer": inject, "extract_layer": extract, "empty_state": empty}
    model, ids = model_of(kind, seed, **changed), ids_of(length, seed)
    reading = model.read(ids)
    assert len(reading.thoughts) == length // chunk_size
    assert len(reading.states) == len(reading.thoughts) + 1
    with torch.no_grad():
        out = model(torch.tensor([ids]), gold_of(reading.thoughts))
    torch.testing.assert_close(out.logits[0], reading.logits, atol=1e-4, rtol=1e-4)
    for said, thought in zip(out.thought_logits[0].argmax(-1).tolist(), reading.thoughts, strict=True):
        ended = len(thought) < model.config.max_thought_tokens
        assert tuple(said[: len(thought) + ended]) == (thought + (0,) * ended)


@pytest.mark.parametrize("empty", ["keep", "zero"])
@pytest.mark.parametrize("kind", sorted(BACKBONES))
def test_read_equals_reading_anew_for_each_chunk(kind: str, empty: str) -> None:
    lengths = set()
    for seed in range(3):
        model, ids = model_of(kind, seed, empty_state=empty), ids_of(30, seed)
        expected, found = read_anew(model, ids), model.read(ids)
        assert found.thoughts == expected.thoughts
        torch.testing.assert_close(found.states, expected.states, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        lengths |= set(map(len, found.thoughts))
    assert 0 in lengths
    assert len(lengths) > 2


@pytest.mark.parametrize("layers", [(0, 0), (0, -1), (1, 1), (1, -1), (2, 2)])
@pytest.mark.parametrize("kind", sorted(BACKBONES))
def test_decode_is_the_backbone_with_states_added(kind: str, layers: tuple[int, int]) -> None:
    """By transformers' own forward, which knows its layers' windows, and hooks on two layers' inputs."""
    inject, extract = layers
    model = model_of(kind, inject_layer=inject, extract_layer=extract)
    ids, states = torch.tensor([ids_of(30), ids_of(30, 1)]), torch.randn(2, 30, 16)
    inner: Any = model.backbone.model
    seen: list[torch.Tensor] = []
    hooks = [
        inner.layers[inject].register_forward_pre_hook(lambda _, given: (given[0] + states,)),
        inner.layers[extract].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
    ]
    with torch.no_grad():
        expected = model.backbone(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        logits, extracted = model.decode(ids, states)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(extracted, seen[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(BACKBONES))
def test_blocks_are_layers_without_a_window(kind: str) -> None:
    """T is a whole decoder of one layer, C one without an output layer."""
    model, rows = model_of(kind), torch.randn(2, 20, 16)
    alone: Any = AutoModelForCausalLM.from_config(model.config.block()).eval()
    thinker, compressor = model.thinker, model.compressor
    alone.model.layers[0], alone.model.norm, alone.lm_head = thinker.layer, thinker.norm, thinker.head
    with torch.no_grad():
        expected = alone(inputs_embeds=rows, use_cache=False).logits
        said = thinker.head(thinker.norm(model._layer(thinker.layer, rows)))
        torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
        alone.model.layers[0], alone.model.norm = compressor.layer, torch.nn.Identity()
        expected = alone.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        torch.testing.assert_close(model._layer(compressor.layer, rows), expected, atol=1e-4, rtol=1e-4)


def test_states_change_what_follows() -> None:
    """Else a test of thoughts would test nothing."""
    model, ids = model_of(), ids_of(30)
    with torch.no_grad():
        plain = model.decode(torch.tensor([ids]))[0][0]
    logits = model.read(ids).logits
    torch.testing.assert_close(logits[:4], plain[:4], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[8:], plain[8:], atol=1e-2)


@examples(30)
@given(cut=st.integers(1, 29), seed=st.integers(0, 5))
def test_what_follows_never_changes_earlier_logits(cut: int, seed: int) -> None:
    model = model_of(seed=seed)
    ids = ids_of(30, seed)
    other = ids[:cut] + ids_of(30, seed + 100)[cut:]
    one, two = model.read(ids), model.read(other)
    assert one.thoughts[: cut // 4] == two.thoughts[: cut // 4]
    torch.testing.assert_close(one.logits[:cut], two.logits[:cut], atol=1e-5, rtol=1e-5)
    thoughts = gold_of(one.thoughts)
    with torch.no_grad():
        changed = thoughts.clone()
        changed[0, cut // 4 :] = thoughts[0, cut // 4 :].flip(0)
        ahead = model(torch.tensor([ids]), thoughts).logits, model(torch.tensor([other]), changed).logits
    torch.testing.assert_close(ahead[0][:, :cut], ahead[1][:, :cut], atol=1e-5, rtol=1e-5)


@examples(20)
@given(length=st.integers(1, 20), new=st.integers(0, 12), seed=st.integers(0, 5))
def test_generated_tokens_are_read_like_any_others(length: int, new: int, seed: int) -> None:
    model = model_of(seed=seed)
    reading = model.read(ids_of(length, seed), new)
    assert len(reading.tokens) == length + new or reading.tokens[-1] == 0
    read = reading.tokens[: -1 if len(reading.tokens) > length else None]  # the last one is not read
    again = model.read(read)
    assert again.logits.argmax(-1)[length - 1 :].tolist()[:new] == reading.tokens[length:]
    assert again.thoughts == reading.thoughts
    assert len(reading.logits) == len(read)
    torch.testing.assert_close(reading.logits, again.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reading.states, again.states, atol=1e-5, rtol=1e-5)


def test_a_thought_without_end_is_cut_off_at_its_limit() -> None:
    torch.manual_seed(0)
    model = ThinkingStatesForCausalLM(ThinkingStatesConfig(BACKBONES["llama"](), max_thought_tokens=3)).eval()
    with torch.no_grad():
        model.thinker.norm.weight.zero_()  # all tokens are equally likely
    assert model.read(ids_of(8)).thoughts == [(), ()]  # ties to the lowest id, the end
    with torch.no_grad():
        model.thinker.norm.weight.fill_(1.0)
        model.thinker.head.weight[0] = 0.0
        model.thinker.head.weight[5] = 100 * model.thinker.head.weight[4]
        model.thinker.head.weight[6] = -model.thinker.head.weight[5]
    assert [len(thought) for thought in model.read(ids_of(8)).thoughts] == [3, 3]


@pytest.mark.parametrize("thought", [(), (3,), (3, 4, 5), (3, 4, 5, 6, 7)])
def test_a_state_is_the_last_outputs_of_a_thought_and_its_end(thought: tuple[int, ...]) -> None:
    model = model_of(chunk_size=4)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor([[*thought, 0]]))
        made = model._layer(model.compressor.layer, embedded)[0]
        states = model.compress([(9, 8, 7, 6, 5), thought, (1,)])[1]
    count = min(4, len(thought) + 1)
    torch.testing.assert_close(states[4 - count :], made[-count:], atol=1e-5, rtol=1e-5)
    assert not states[: 4 - count].any()


def test_the_loss_is_that_of_answers_and_thoughts() -> None:
    model, ids = model_of(), ids_of(9)
    thoughts = torch.tensor([[[7, 0, IGNORED], [0, IGNORED, IGNORED]], [[5, 6, 0], [IGNORED] * 3]])
    rows = torch.tensor([ids, ids_of(9, 1)])
    labels = torch.full_like(rows, IGNORED)
    labels[0, 7:] = rows[0, 7:]
    labels[1, 4] = rows[1, 4]
    out = model(rows, thoughts, labels)
    chances, said = out.logits.log_softmax(-1), out.thought_logits.log_softmax(-1)
    answers = [chances[0, 6, ids[7]], chances[0, 7, ids[8]], chances[1, 3, rows[1, 4]]]
    gold = [said[0, 0, 0, 7], said[0, 0, 1, 0], said[0, 1, 0, 0], said[1, 0, 0, 5], said[1, 0, 1, 6], said[1, 0, 2, 0]]
    expected = -torch.stack(answers).mean() - torch.stack(gold).mean()
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    model.zero_grad()


def test_thoughts_must_match_the_chunks() -> None:
    with pytest.raises(ValueError, match=r"thoughts must be \[1, 2, width\], got \[1, 3, 2\]"):
        model_of()(torch.tensor([ids_of(9)]), torch.zeros(1, 3, 2, dtype=torch.int64))


def test_without_thoughts_the_model_thinks_itself() -> None:
    model, ids = model_of(), ids_of(14)
    assert torch.equal(model(torch.tensor([ids])).logits[0], model.read(ids).logits)


def test_the_attention_of_all_layers_can_be_replaced() -> None:
    model = ThinkingStatesForCausalLM(ThinkingStatesConfig(BACKBONES["mistral"]()))
    model.set_attn_implementation("eager")
    layers: list[Any] = [*model.backbone.model.layers, model.thinker.layer, model.compressor.layer]
    assert {layer.self_attn.config._attn_implementation for layer in layers} == {"eager"}
