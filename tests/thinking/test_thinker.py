"""T and C as packed passes: the arithmetic of the model, and the same bits for a chunk or a thought in any company."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import thinking_models
from helpers.examples import examples
from helpers.thinking_models import HIDDEN, save_model
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.kernels.probe import same_bits
from detgen.passes import preparing, thinker
from detgen.passes.adapter import PlainDecoder
from detgen.passes.embedding import broken_embedding
from detgen.passes.lean_decoder import LeanDecoder, LeanDecoderLayer
from detgen.passes.loading import LoadedModel, load_model
from detgen.passes.packing import Windows
from detgen.passes.preparing import Prepared, prepare
from detgen.passes.thinker import SLOTS, Block, Thinker
from detgen.thinking.modeling import ThinkingStatesForCausalLM

CPU = torch.device("cpu")
COUNT, CHUNK = 24, 4
CHUNKS = torch.randn(COUNT, CHUNK, HIDDEN, generator=torch.Generator().manual_seed(4))
Thought = tuple[int, ...]
END = 7  # not the token of padding rows, nor what is chosen where nothing is comparable


def random_model(thinks: Any = "sometimes", backbone: Any = None, **settings: Any) -> ThinkingStatesForCausalLM:
    """As the helper's, with another end; no token's embedding is zeros."""
    backbone = {"eos_token_id": END, **(backbone or {})}
    model = thinking_models.random_model(thinks, backbone=backbone, **settings)
    head, embedding = model.thinker.head.weight.data, model.get_input_embeddings().weight.data
    head[[0, END]] = head[[END, 0]]
    embedding[thinking_models.END] = embedding[1].flip(0)
    return model


def prepared(model: ThinkingStatesForCausalLM, *, allowed: bool = False) -> Prepared:
    loaded = LoadedModel("a model", model, None, "", 512, frozenset({END}), model.dtype)
    return prepare(loaded, None, CPU, batch_size=4, kv_memory=8 << 20, allow_nondeterministic=allowed)


class Model(NamedTuple):
    """A prepared thinking model, and the same as transformers runs it."""

    prepared: Prepared
    own: ThinkingStatesForCausalLM

    @property
    def thinker(self) -> Thinker:
        assert self.prepared.thinking is not None
        return self.prepared.thinking.thinker

    @property
    def name(self) -> str:
        """Its key in `models`."""
        return "lean" if type(self.thinker.writer.forward.model) is LeanDecoder else "plain"

    @classmethod
    def of(cls, model: ThinkingStatesForCausalLM) -> Model:
        return cls(prepared(copy.deepcopy(model)), model)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Lean, and run by transformers' modules."""
    with pytest.MonkeyPatch.context() as patch:
        lean = Model.of(random_model())
        patch.setattr(preparing, "lean_decoder", lambda *_: None)
        return {"lean": lean, "plain": Model.of(random_model())}


@pytest.fixture(params=["lean", "plain"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    found = models[request.param]
    kind = {"lean": LeanDecoder, "plain": PlainDecoder}[request.param]
    for block in (found.thinker.writer, found.thinker.compressor):
        assert type(block.forward.model) is kind
    return found


class Recording:
    """Keeps what each slot's windows give, in order, while T or C runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logits: list[list[torch.Tensor]] = []
        run = Block.run

        def recorded(block: Block, windows: Windows, rows: torch.Tensor | None = None) -> torch.Tensor:
            out = run(block, windows, rows)
            if not windows.starts.any():  # these slots begin anew
                self._first = len(self.logits)
                self.logits += [[] for _ in windows.slots]
            parts = out.split(windows.logits.tolist())
            for slot, part in zip(windows.slots.tolist(), parts, strict=True):
                self.logits[self._first + slot].append(part.clone())
            return out

        patch.setattr(Block, "run", recorded)

    def taken(self) -> list[torch.Tensor]:
        found = [torch.cat(parts) for parts in self.logits]
        self.logits = []
        return found


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)


def own_logits(own: ThinkingStatesForCausalLM, chunk: torch.Tensor, thought: Thought) -> torch.Tensor:
    """T's logits for a thought about a chunk and for what follows it, by transformers' modules."""
    rows = torch.cat([chunk, own.get_input_embeddings()(torch.tensor(thought, dtype=torch.int64))])
    mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)
    turns = own.backbone.model.rotary_emb(rows[None], torch.arange(len(rows))[None])
    with torch.no_grad():
        out = own.thinker.layer(rows[None], attention_mask=mask[None, None], position_embeddings=turns)
        found: torch.Tensor = own.thinker.head(own.thinker.norm(out))[0, len(chunk) - 1 :]
    return found


def test_equals_the_models_own_arithmetic(model: Model, recording: Recording) -> None:
    """Thoughts, T's logits and C's states, of chunks that think much, little and not at all."""
    thoughts = model.thinker.think(CHUNKS, np.arange(COUNT))
    assert thoughts == model.own.think(CHUNKS)
    assert {0, 1, model.thinker.most} <= {len(t) for t in thoughts if t is not None}
    for chunk, thought, logits in zip(CHUNKS, thoughts, recording.taken(), strict=True):
        assert thought is not None
        want = own_logits(model.own, chunk, thought)[: len(logits)]
        assert len(want) == len(logits)
        assert (logits - want).abs().max() < 1e-4 * want.abs().max()
    some: list[Thought] = [t for t in thoughts if t]
    states = torch.stack(model.thinker.states(some))
    with torch.no_grad():
        want = model.own.compress(some)
    assert (states - want).abs().max() < 1e-4 * want.abs().max()


def test_short_thoughts_have_their_states_at_the_last_places(model: Model) -> None:
    """Zeros before them; zeros alone where nothing was thought, which C does not read."""
    for length in range(6):
        state = model.thinker.state(tuple(range(1, length + 1)))
        assert state.shape == (CHUNK, HIDDEN)
        rows = min(length + 1, CHUNK) if length else 0
        assert not state[: CHUNK - rows].any()
        assert state[CHUNK - rows :].any(1).all()


@pytest.fixture(scope="module")
def alone(models: dict[str, Model]) -> dict[str, list[torch.Tensor]]:
    """T's logits about each chunk, thought about by itself."""
    with pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        for model in models.values():
            for chunk in CHUNKS:
                model.thinker.think(chunk[None], np.zeros(1, np.int64))
        found = recording.taken()
    return {name: found[i * COUNT : (i + 1) * COUNT] for i, name in enumerate(models)}


THOUGHTS: list[Thought] = [tuple(range(7 * i, 7 * i + 1 + i % 5)) for i in range(1, 20)]


@pytest.fixture(scope="module")
def states_alone(models: dict[str, Model]) -> dict[str, list[torch.Tensor]]:
    """C's states of each thought, by itself."""
    found = {}
    for name, model in models.items():
        found[name] = []
        for thought in THOUGHTS:
            model.thinker._states.clear()
            found[name].append(model.thinker.state(thought).clone())
    return found


class Room(NamedTuple):
    """What a thinker runs in: of which model, by how many threads, in how many slots, passes of how many rows."""

    name: str
    threads: int
    slots: int
    rows: int

    def lay_out(self, patch: pytest.MonkeyPatch, models: dict[str, Model]) -> Thinker:
        """The thinker with no more room than this."""
        torch.set_num_threads(self.threads)
        patch.setattr(thinker, "SLOTS", self.slots)
        found = models[self.name].thinker
        for name in ("writer", "compressor"):
            block = getattr(found, name)
            rows = tuple(n for n in block.shapes.rows if n <= self.rows)
            patch.setattr(found, name, block._replace(shapes=replace(block.shapes, rows=rows)))
        return found


ROOMS = st.builds(
    Room,
    *(st.sampled_from(["lean", "plain"]), st.sampled_from([1, 2])),
    *(st.sampled_from([1, 3, 7, SLOTS]), st.sampled_from([3, 5, 16, 511])),
)


@examples(40)
@given(order=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=2 * COUNT), room=ROOMS)
def test_no_bit_of_a_thought_depends_on_others(
    models: dict[str, Model], alone: dict[str, list[torch.Tensor]], order: list[int], room: Room
) -> None:
    """Chunks beside others in any order, in groups and passes of any size, in pages that held other chunks."""
    with pytest.MonkeyPatch.context() as patch:
        found = room.lay_out(patch, models)
        recording = Recording(patch)
        thoughts = found.think(CHUNKS[order], np.arange(len(order)))
        logits = recording.taken()
    assert len(logits) == len(thoughts) == len(order)
    for i, got in zip(order, logits, strict=True):
        assert same_bits(got, alone[room.name][i])


@examples(40)
@given(order=st.lists(st.integers(0, len(THOUGHTS) - 1), min_size=1, max_size=30), room=ROOMS)
def test_no_bit_of_a_state_depends_on_others(
    models: dict[str, Model], states_alone: dict[str, list[torch.Tensor]], order: list[int], room: Room
) -> None:
    """Thoughts beside others in any order, several times the same, some of them remembered."""
    with pytest.MonkeyPatch.context() as patch:
        found = room.lay_out(patch, models)
        for kept in order[: len(order) // 3]:
            found._states.pop(THOUGHTS[kept], None)
        states = found.states([THOUGHTS[i] for i in order])
    assert all(same_bits(state, states_alone[room.name][i]) for i, state in zip(order, states, strict=True))


@examples(40)
@given(
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=COUNT),
    order=st.permutations(range(COUNT)),
    slots=st.sampled_from([2, 5, SLOTS]),
)
def test_each_owner_thinks_once(models: dict[str, Model], owners: list[int], order: list[int], slots: int) -> None:
    """What stands before the first chunk of an owner that thinks thinks nothing, what stands behind it is not known."""
    model = models["lean"]
    chunks = order[: len(owners)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinker, "SLOTS", slots)
        found = model.thinker.think(CHUNKS[chunks], np.array(owners))
    thoughts = model.own.think(CHUNKS)
    thought: set[int] = set()
    for owner, chunk, got in zip(owners, chunks, found, strict=True):
        assert got == (None if owner in thought else thoughts[chunk])
        thought |= {owner} if thoughts[chunk] else set()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_thought_without_end_is_cut_off(most: int) -> None:
    """It is what a longer limit would give, as far as the limit; C reads it with its end."""
    long = random_model(max_thought_tokens=20)
    want = long.think(CHUNKS)
    short = Model.of(random_model(max_thought_tokens=most))
    assert short.thinker.most == most
    thoughts = short.thinker.think(CHUNKS, np.arange(COUNT))
    assert thoughts == [t[:most] for t in want]
    cut = next(t[:most] for t in want if len(t) > most)
    with torch.no_grad():
        state = long.compress([cut])[0]
    assert (short.thinker.state(cut) - state).abs().max() < 1e-4 * state.abs().max()


def test_endless_thoughts() -> None:
    """A T that never ends a thought."""
    thoughts = Model.of(random_model("always", max_thought_tokens=9)).thinker.think(CHUNKS, np.arange(COUNT))
    assert {len(t) for t in thoughts if t is not None} == {9}


def test_remembered_states(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """C reads a thought once; those that were not used for long are forgotten, and come out the same again."""
    found = models["lean"].thinker
    passes = found.compressor.forward
    monkeypatch.setattr(found, "_kept", 3)
    found._states.clear()
    a, b, c, d = THOUGHTS[:4]
    before = passes.passes
    first = found.states([a, b, a, (), c])
    assert passes.passes == before + 1
    assert first[0] is first[2]
    assert all(x is y for x, y in zip(found.states([c, a]), (first[4], first[0]), strict=True))
    assert passes.passes == before + 1
    found.state(d)
    assert set(found._states) == {c, a, d}, "the least recently used is forgotten"
    again = found.state(b)
    assert passes.passes == before + 3
    assert again is not first[1]
    assert same_bits(again, first[1])
    many = [found.state(t) for t in THOUGHTS]
    assert len(found._states) == 3
    found._states.clear()
    assert all(same_bits(x, y) for x, y in zip(found.states(THOUGHTS), many, strict=True))
    assert len(found._states) == 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_broken_chunk_harms_no_other(
    model: Model, alone: dict[str, list[torch.Tensor]], recording: Recording, value: float
) -> None:
    """Neither the chunks beside it nor those that get its page; it ends, whatever it thinks."""
    chunks = CHUNKS.clone()
    broken = [1, COUNT - 1]
    chunks[1, 2] = value
    chunks[COUNT - 1, :, 5] = value
    thoughts = model.thinker.think(chunks, np.arange(COUNT))
    logits = recording.taken()
    assert all(same_bits(logits[i], alone[model.name][i]) for i in range(COUNT) if i not in broken)
    for i in broken:
        thought = thoughts[i]
        assert thought is not None
        assert len(thought) <= model.thinker.most
        assert model.thinker.state(thought).isfinite().all()
    assert thoughts[-1] == () or value == 3e38
    recording.taken()
    again = model.thinker.think(CHUNKS.flip(0), np.arange(COUNT))
    assert again == model.own.think(CHUNKS.flip(0))
    assert all(same_bits(a, b) for a, b in zip(recording.taken(), alone[model.name][::-1], strict=True))


def test_a_broken_token_breaks_no_thought(model: Model, states_alone: dict[str, list[torch.Tensor]]) -> None:
    """The embedding that a check breaks is the backbone's; what is remembered meanwhile stays right."""
    thought = THOUGHTS[4]
    model.thinker._states.clear()
    with broken_embedding(model.prepared.passes[0].model, thought[0]):
        assert same_bits(model.thinker.state(thought), states_alone[model.name][4])


def test_no_chunks(model: Model) -> None:
    assert model.thinker.think(CHUNKS[:0], np.zeros(0, np.int64)) == []
    assert model.thinker.states([]) == []


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lean", [True, False])
def test_other_backbones(monkeypatch: pytest.MonkeyPatch, kind: str, lean: bool) -> None:
    if not lean:
        monkeypatch.setattr(preparing, "lean_decoder", lambda *_: None)
    settings = {"model_type": kind, **({"use_sliding_window": True} if "qwen" in kind else {})}
    model = Model.of(random_model(backbone=settings))
    thoughts = model.thinker.think(CHUNKS, np.arange(COUNT))
    assert thoughts == model.own.think(CHUNKS)
    with torch.no_grad():
        want = model.own.compress([t for t in thoughts if t])
    states = torch.stack(model.thinker.states([t for t in thoughts if t]))
    assert (states - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(("part", "letter"), [("writer", "T"), ("compressor", "C")])
def test_blocks_that_mix_rows_are_refused(monkeypatch: pytest.MonkeyPatch, part: str, letter: str) -> None:
    """As a target is; where it is allowed, nothing is guaranteed."""
    made: list[LeanDecoder] = []
    init, forward = LeanDecoder.__init__, LeanDecoderLayer.forward

    def noted(self: LeanDecoder, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    def mixed(self: LeanDecoderLayer, x: torch.Tensor, *more: Any) -> torch.Tensor:
        out = forward(self, x, *more)
        which = [self in decoder.layers for decoder in made].index(True)
        return out if which != 1 + "TC".index(letter) else out * (1 + 2.0**-22 * torch.arange(len(out))[:, None])

    monkeypatch.setattr(LeanDecoder, "__init__", noted)
    monkeypatch.setattr(LeanDecoderLayer, "forward", mixed)
    with pytest.raises(EngineError, match=f"{letter} of a model is not row-invariant.*--allow-nondeterministic"):
        prepared(random_model())
    made.clear()
    found = prepared(random_model(), allowed=True)
    assert not found.probe.row_invariant
    assert found.thinking is not None
    assert not getattr(found.thinking.thinker, part).probe.row_invariant
    assert len(found.thinking.thinker.think(CHUNKS, np.arange(COUNT))) == COUNT


def test_the_probe_looks_at_both(model: Model) -> None:
    for block in (model.thinker.writer, model.thinker.compressor):
        assert block.probe.row_invariant
        assert block.probe.positions > 0
        assert block.shapes.most_rows >= 128
        assert 0 < block.probe.reference_error < 1e-5
        assert len(block.forward.cache.keys) == 1
        assert block.forward.cache.pages.count == SLOTS
    assert model.prepared.probe.row_invariant
    assert not model.prepared.passes[0].model.concurrent, "the threads of an audit would share T's pages"


@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_quantized(demo_models: Any, tmp_path: Path, quant: Any) -> None:
    """The backbone, T and C alike; a chunk has the same bits in any company."""
    pytest.importorskip("bitsandbytes")
    folder = save_model(tmp_path, random_model(backbone={"intermediate_size": 128}), demo_models.target)
    load = partial(load_model, folder, "a model", CPU, "float32")
    made = prepare(load(quant), None, CPU, batch_size=4, kv_memory=8 << 20, allow_nondeterministic=False)
    assert made.thinking is not None
    found = made.thinking.thinker
    linears = {"int8": "Linear8bitLt", "nf4": "Linear4bit"}[quant]
    for block in (made.passes[0], found.writer.forward, found.compressor.forward):
        kinds = {type(m).__name__ for name, m in block.model.named_modules() if name.endswith("_proj")}
        assert kinds == {linears}
    with pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        found.think(CHUNKS, np.arange(COUNT))
        together = recording.taken()
        for i in range(0, COUNT, 5):
            found.think(CHUNKS[i : i + 1], np.zeros(1, np.int64))
            assert same_bits(recording.taken()[0], together[i])
    states = [state.clone() for state in found.states(THOUGHTS)]
    for thought, state in zip(THOUGHTS[::5], states[::5], strict=True):
        found._states.clear()
        assert same_bits(found.state(thought), state)


def test_the_shipped_model_thinks_what_it_should(demo_models: Any) -> None:
    """About the hidden states that its own plain reading finds, all chunks at a time."""
    loaded = load_model(demo_models.target.parent / "thinking", "thinking", CPU, "float32", "none")
    own = copy.deepcopy(loaded.model)
    model = prepare(loaded, None, CPU, batch_size=4, kv_memory=8 << 20, allow_nondeterministic=False)
    assert model.thinking is not None
    found = model.thinking.thinker
    text = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
    ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    reading = own.read(ids[0])
    whole = len(reading.thoughts) * found.chunk
    with torch.no_grad():
        _, hidden = own.decode(ids[:, :whole], reading.states[:-1].flatten(0, 1)[None])
    chunks = hidden[0].view(-1, found.chunk, found.hidden)
    assert found.think(chunks, np.arange(len(chunks))) == reading.thoughts
    said = [loaded.tokenizer.decode(list(t)) for t in reading.thoughts if t]
    assert said == [" heads", " tails", " heads"]
    for thought, state in zip(reading.thoughts, reading.states[1:], strict=True):
        if thought:
            assert (found.state(thought) - state).abs().max() < 1e-4 * state.abs().max()
