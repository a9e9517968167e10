"""T and C as packed passes: the arithmetic of the model, and the same bits for a chunk or a thought in any company."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import thinking_models
from helpers.examples import examples
from helpers.own_forward import KINDS, decoders
from helpers.thinking_models import HIDDEN
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.generic.generic_decoder import GenericDecoder
from detgen.kernels.input_batch import Windows
from detgen.machine import CPU
from detgen.models.loaded import LoadedModel
from detgen.program.arrays import same_bits
from detgen.runner import thinker
from detgen.runner.preparing import Prepared, prepare
from detgen.runner.thinker import SLOTS, Block, Thinker
from detgen.thinking.modeling import ThinkingStatesForCausalLM

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


def prepared(model: ThinkingStatesForCausalLM) -> Prepared:
    loaded = LoadedModel("a model", model, None, "", 512, frozenset({END}))
    return prepare(loaded, None, CPU, batch_size=4, kv_memory=8 << 20)


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
        return kind_of(self.thinker.writer.runner.decoder)

    @classmethod
    def of(cls, model: ThinkingStatesForCausalLM) -> Model:
        return cls(prepared(copy.deepcopy(model)), model)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """By the kind of their decoders."""
    made = {}
    for kind in KINDS:
        with decoders(kind):
            made[kind] = Model.of(random_model())
    return made


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    found = models[request.param]
    for block in (found.thinker.writer, found.thinker.compressor):
        assert kind_of(block.runner.decoder) == request.param
    return found


def kind_of(decoder: object) -> str:
    return {CDecoder: "c", GenericDecoder: "generic"}[type(decoder)]


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
        patch.setattr(thinker, "MOST_ROWS", self.rows)
        return found


ROOMS = st.builds(
    Room,
    *(st.sampled_from(KINDS), st.sampled_from([1, 2])),
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
    model = models["c"]
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
    found = models["c"].thinker
    passes = found.compressor.runner
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
