"""Passes that bring states and take hidden states: what a layer is told reaches that row and those that see it."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.examples import examples, usual
from helpers.oracle import Passes
from helpers.own_forward import KINDS, decoders
from helpers.thinking_models import HIDDEN, random_model
from hypothesis import given
from hypothesis import strategies as st

from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.exchange import Exchange
from detgen.kernels.generic.generic_decoder import GenericDecoder
from detgen.kernels.generic.paged_attention import PagedAttention
from detgen.kernels.input_batch import MOST_ROWS, Window
from detgen.machine import CPU
from detgen.models.loaded import LoadedModel
from detgen.program.arrays import array, same_bits, tensor
from detgen.runner.model_runner import ModelRunner
from detgen.runner.preparing import Prepared, prepare
from detgen.thinking.modeling import ThinkingStatesForCausalLM

SLOTS, LENGTH = 3, 70  # sequences of random tokens, longer than a page and than the sliding window
LAYERS = 3
G = torch.Generator().manual_seed(3)
TOKENS = torch.randint(0, 4096, (SLOTS, LENGTH), generator=G)
STATES = torch.randn(SLOTS, LENGTH, HIDDEN, generator=G) * 0.5


class Model(NamedTuple):
    """A prepared thinking model, and the same as transformers runs it."""

    prepared: Prepared
    own: ThinkingStatesForCausalLM

    @property
    def forward(self) -> ModelRunner:
        return self.prepared.runners[0]

    def run(self, windows: list[tuple[int, int, int]], exchange: Exchange | None = None) -> np.ndarray:
        """The logits of all rows of windows (slot, start, end) of the sequences."""
        tokens = TOKENS.tolist()
        found = [Window(slot, start, tokens[slot][start:end], end - start) for slot, start, end in windows]
        return array(self.forward.run(found, exchange=exchange))

    def fresh(self) -> None:
        self.forward.cache.pages.lay_out(SLOTS, LENGTH)


def prepared(kind: str) -> Model:
    model = random_model()
    own = copy.deepcopy(model)
    with decoders(kind):
        loaded = LoadedModel("a model", model, None, "", 512, frozenset({0}))
        settings: dict[str, Any] = {"batch_size": 4, "kv_memory": 8 << 20}
        found = prepare(loaded, None, CPU, **settings)
    found.runners[0].thinking = None  # which would bring states to a pass without an exchange
    return Model(found, own)


@pytest.fixture(scope="module")
def kinds() -> dict[str, Model]:
    return {kind: prepared(kind) for kind in KINDS}


DECODERS = {"c": CDecoder, "generic": GenericDecoder}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, kinds: dict[str, Model]) -> Model:
    found = kinds[request.param]
    assert found.forward.decoder.__class__ is DECODERS[request.param]
    found.fresh()
    return found


def entries(model: Model, slot: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    return model.forward.cache.entries(slot, 0, end)


@pytest.mark.parametrize(
    ("inject", "extract"), usual([(0, 2), (1, 1), (2, 2)], itertools.combinations_with_replacement(range(3), 2))
)
def test_equals_the_models_own_forward(model: Model, inject: int, extract: int, compared: Passes) -> None:
    """Logits, and the hidden states that T reads: after the addition, where both are at one layer.

    Where it runs as a program, they are those of the interpreter, too.
    """
    settings: dict[str, Any] = {"inject_layer": inject, "extract_layer": extract}
    model.own.config.update(settings)
    with torch.no_grad():
        logits, hidden = model.own.decode(TOKENS[:1], STATES[:1])
    exchange = Exchange(inject, extract, STATES[0])
    found = tensor(model.run([(0, 0, LENGTH)], exchange))
    assert len(compared) == isinstance(model.forward.decoder, CDecoder)
    assert exchange.hidden is not None
    assert exchange.hidden.dtype == torch.float32
    assert (found - logits[0]).abs().max() < 1e-4 * logits.abs().max()
    assert (exchange.hidden - hidden[0]).abs().max() < 1e-4 * hidden.abs().max()


def test_all_kinds_agree(kinds: dict[str, Model]) -> None:
    found = []
    for model in kinds.values():
        model.fresh()
        exchange = Exchange(1, 2, STATES[:2, :60].flatten(0, 1))
        found.append((tensor(model.run([(0, 0, 60), (1, 0, 60)], exchange)), exchange.hidden))
    for a, *others in zip(*found, strict=True):
        assert all((a - b).abs().max() < 1e-4 * a.abs().max() for b in others)


def test_zero_states_change_nothing(model: Model) -> None:
    """Not one bit, of logits and of KV entries."""
    windows = [(0, 0, LENGTH), (2, 0, 5)]
    logits = model.run(windows).copy()
    want = entries(model, 0, LENGTH)
    model.fresh()
    found = model.run(windows, Exchange(1, 2, torch.zeros(LENGTH + 5, HIDDEN)))
    assert same_bits(found, logits)
    assert all(same_bits(a, b) for a, b in zip(entries(model, 0, LENGTH), want, strict=True))


@pytest.mark.parametrize("inject", range(LAYERS))
def test_a_state_reaches_its_row_and_those_that_see_it(model: Model, inject: int) -> None:
    """No row before, no other slot, no layer below."""
    windows, at = [(0, 0, 20), (1, 0, 20), (2, 3, 9)], 7
    count = 46
    calm = Exchange(inject, 2, torch.zeros(count, HIDDEN))
    want = model.run(windows, calm).copy()
    before = entries(model, 0, 20)
    model.fresh()
    states = torch.zeros(count, HIDDEN)
    states[at] = STATES[0, at]
    told = Exchange(inject, 2, states)
    found = model.run(windows, told)
    assert calm.hidden is not None
    assert told.hidden is not None
    same = [same_bits(found[i], want[i]) for i in range(count)]
    assert same == [not at <= i < 20 for i in range(count)]
    unseen = [same_bits(told.hidden[i], calm.hidden[i]) for i in range(count)]
    assert unseen == [i != at if inject == 2 else not at <= i < 20 for i in range(count)]
    for a, b in zip(entries(model, 0, 20), before, strict=True):
        changed = [[i for i in range(20) if not same_bits(a[n, i], b[n, i])] for n in range(LAYERS)]
        rows: dict[int, list[int]] = {inject - 1: [], inject: [at], inject + 1: list(range(at, 20))}
        for layer, expected in rows.items():
            assert layer not in range(LAYERS) or changed[layer] == expected


@pytest.fixture(scope="module")
def alone(kinds: dict[str, Model]) -> dict[str, list[tuple[np.ndarray, ...]]]:
    """Logits, hidden states, keys and values of each sequence, read row by row."""

    def read(model: Model, slot: int) -> tuple[np.ndarray, ...]:
        model.fresh()
        logits, hidden = [], []
        for i in range(LENGTH):
            exchange = Exchange(1, 2, STATES[slot, i : i + 1])
            logits.append(model.run([(slot, i, i + 1)], exchange).copy())
            hidden.append(array(exchange.hidden))
        return np.concatenate(logits), np.concatenate(hidden), *entries(model, slot, LENGTH)

    return {name: [read(model, slot) for slot in range(SLOTS)] for name, model in kinds.items()}


@examples(25)
@given(data=st.data(), name=st.sampled_from(KINDS), threads=st.sampled_from([1, 2]))
def test_no_bit_depends_on_the_packing(
    kinds: dict[str, Model],
    alone: dict[str, list[tuple[np.ndarray, ...]]],
    data: st.DataObject,
    name: str,
    threads: int,
) -> None:
    """Sequences in windows of any length, beside each other in any order."""
    model = kinds[name]
    model.fresh()
    torch.set_num_threads(threads)
    done = [0] * SLOTS
    parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {slot: [] for slot in range(SLOTS)}
    while min(done) < LENGTH:
        left = [slot for slot in range(SLOTS) if done[slot] < LENGTH]
        slots = data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=len(left), unique=True))
        room = MOST_ROWS // len(slots)
        windows = []
        for slot in slots:
            width = data.draw(st.integers(1, min(LENGTH - done[slot], room)))
            windows.append((slot, done[slot], done[slot] + width))
            done[slot] += width
        exchange = Exchange(1, 2, torch.cat([STATES[slot, start:end] for slot, start, end in windows]))
        ends = np.cumsum([end - start for _, start, end in windows])[:-1]
        logits = np.split(model.run(windows, exchange), ends)
        assert exchange.hidden is not None
        for slot, *found in zip(slots, logits, np.split(array(exchange.hidden), ends), strict=True):
            parts[slot].append((found[0].copy(), found[1].copy()))
    for slot in range(SLOTS):
        got = [np.concatenate(x) for x in zip(*parts[slot], strict=True)]
        got += entries(model, slot, LENGTH)
        assert all(same_bits(a, b) for a, b in zip(got, alone[name][slot], strict=True))


def test_a_broken_state_stays_in_its_slot(model: Model) -> None:
    """Rows of other slots, and those before it, have the bits that they have beside any other."""
    windows = [(0, 0, 10), (1, 0, 10)]
    states = torch.cat([STATES[0, :10], STATES[1, :10]])
    want = Exchange(1, 2, states)
    logits = model.run(windows, want).copy()
    model.fresh()
    broken = states.clone()
    broken[4] = torch.nan
    exchange = Exchange(1, 2, broken)
    rows: list[int] = []
    tokens = TOKENS.tolist()
    found = model.forward.run([Window(slot, 0, tokens[slot][:10], 10) for slot in (0, 1)], rows, exchange)
    assert exchange.hidden is not None
    assert want.hidden is not None
    for a, b in ((found, logits), (array(exchange.hidden), array(want.hidden))):
        assert same_bits(a[:4], b[:4])
        assert same_bits(a[10:], b[10:])
        assert np.isnan(a[4]).any()
    assert rows == [4]


def test_a_pass_leaves_no_hooks(kinds: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass brought is gone with it, also if it fails."""
    model = kinds["generic"]
    model.fresh()
    want = model.run([(0, 0, 5)]).copy()
    model.run([(0, 0, 5)], Exchange(1, 2, STATES[0, :5]))
    assert same_bits(model.run([(0, 0, 5)]), want)

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("no attention")

    monkeypatch.setattr(PagedAttention, "attend", fail)
    with pytest.raises(ValueError, match="no attention"):
        model.run([(0, 0, 5)], Exchange(1, 2, STATES[0, :5]))
    monkeypatch.undo()
    assert same_bits(model.run([(0, 0, 5)]), want)
