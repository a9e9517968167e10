"""The verdict in Triton is that of the engine's `judge`, with the ends that committing gives it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.engine.verification import judge
from detgen.kernels.triton import verify as module
from detgen.kernels.triton.sampling import BROKEN
from detgen.kernels.triton.verify import FAILED, GOES_ON, LENGTH, STOP, TABLE, verify

EOS = (3, 5)


def expected(
    firsts: np.ndarray, drafted: np.ndarray, chosen: np.ndarray, slots: np.ndarray, state: dict[str, np.ndarray]
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """The verdicts, and the slots after them, by the steps of `Committing.commit`."""
    counts = np.diff(firsts)
    owner = np.repeat(np.arange(len(slots)), counts)
    depth = np.arange(len(owner)) - firsts[:-1][owner]
    at = {name: values[slots][owner] for name, values in state.items()}
    produced = at["length"] - at["prompt"] + depth + 1
    stopped = np.isin(chosen, EOS) & (at["stops"] > 0) & (produced > at["least"])
    found = judge(firsts[:-1], drafted, chosen, stopped | (produced >= at["limit"] - at["prompt"]))
    after = {name: values.copy() for name, values in state.items()}
    out = []
    for i, slot in enumerate(slots.tolist()):
        n, busy = int(found.committed[i]), bool(state["busy"][slot])
        row = firsts[i] + n - 1
        why = GOES_ON
        if state["length"][slot] + n >= state["limit"][slot]:
            why = LENGTH
        if stopped[row]:
            why = STOP
        if chosen[row] < 0:
            why = FAILED
        committed = n if busy and why != FAILED else 0
        out.append([min(int(found.accepted[i]), committed), committed, why if busy else GOES_ON, n - 1])
        after["busy"][slot] &= why == GOES_ON
        after["length"][slot] += committed
        if committed:
            after["last"][slot] = chosen[row]
    return out, after


def run(
    firsts: np.ndarray,
    drafted: np.ndarray,
    chosen: np.ndarray,
    slots: np.ndarray,
    state: dict[str, np.ndarray],
    device: str,
    verify: Callable[..., torch.Tensor] = verify,
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    packed = np.full((len(chosen), 4), 77, np.int32)
    packed[:, 3] = chosen
    table = torch.from_numpy(np.stack([state[name] for name in TABLE])).to(device)
    arrays = (torch.from_numpy(x).to(device) for x in (packed, firsts, drafted, slots))
    found = verify(*arrays, table, torch.tensor(EOS, device=device))
    return found.tolist(), dict(zip(TABLE, table.cpu().numpy(), strict=True))


def windows(counts: list[int], seed: int) -> tuple[np.ndarray, ...]:
    """Windows of so many rows, and slots in which anything can end; few tokens, so that drafts often agree."""
    draw = np.random.default_rng(seed)
    firsts = np.cumsum([0, *counts])
    chosen = draw.integers(0, 6, firsts[-1])
    drafted = np.where(draw.random(firsts[-1]) < 0.8, chosen, draw.integers(0, 6, firsts[-1]))
    drafted[firsts[1:] - 1] = -1
    chosen[draw.random(firsts[-1]) < 0.05] = BROKEN
    return firsts, drafted, chosen, draw.permutation(len(counts) + 3)[: len(counts)]


def slots_of(number: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    state = {name: draw.integers(0, 50, number) for name in TABLE}
    state["busy"], state["stops"] = (draw.random((2, number)) < 0.8).astype(np.int64)
    state["prompt"] = draw.integers(1, 20, number)
    state["length"] = state["prompt"] + draw.integers(0, 9, number)
    state["limit"] = state["length"] + draw.integers(1, 9, number)
    state["least"] = np.where(draw.random(number) < 0.5, 0, draw.integers(0, 15, number))
    return state


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(np.array_equal(one[1][name], other[1][name]) for name in TABLE)


@examples(25)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_as_the_engine_judges(device: str, counts: list[int], seed: int) -> None:
    """All windows at once; then one of them alone."""
    firsts, drafted, chosen, slots = windows(counts, seed)
    state = slots_of(len(counts) + 3, seed)
    found = run(firsts, drafted, chosen, slots, state, device)
    assert same(found, expected(firsts, drafted, chosen, slots, state))
    own = slice(*firsts[-2:].tolist())
    alone = run(np.array([0, counts[-1]]), drafted[own], chosen[own], slots[-1:], state, device)
    assert alone[0] == found[0][-1:]
    assert all(alone[1][name][slots[-1]] == found[1][name][slots[-1]] for name in TABLE)


def test_a_long_window(device: str) -> None:
    """Longer than what is compared at a time; it agrees up to the end."""
    firsts = np.array([0, 200])
    chosen = np.full(200, 1)
    drafted = np.append(chosen[1:], -1)
    state = {name: np.array([n]) for name, n in zip(TABLE, (1, 0, 9, 4, 1000, 0, 1), strict=True)}
    for at, token, wanted in ((199, 1, [199, 200, GOES_ON, 199]), (130, 3, [130, 131, STOP, 130])):
        chosen[at] = token
        found, after = run(firsts, drafted, chosen, np.array([0]), state, device)
        assert found == [wanted]
        assert (after["last"][0], after["length"][0]) == (token, 9 + wanted[1])


MUTATIONS = {
    "ends are not seen": ("tl.minimum(tl.minimum(differs, stopped), full)", "tl.minimum(differs, count - 1)"),
    "stops too early": ("(produced + depth + 1 > least)", "(produced + depth + 1 >= least)"),
    "one token too many": ("limit - length - 1, 0)", "limit - length, 0)"),
    "stops what goes on": ("(stops != 0)", "(stops == stops)"),
    "commits what is not finite": ("(busy != 0) & (token >= 0)", "busy != 0"),
    "commits to a free slot": ("(busy != 0) & (token >= 0)", "token >= 0"),
    "counts the correction": ("tl.minimum(differs, committed)", "committed"),
}


@pytest.mark.parametrize("name", ["", *MUTATIONS])
def test_mutations_are_found(device: str, name: str, tmp_path: Path) -> None:
    source = Path(str(module.__file__)).read_text()
    if name:
        old, new = MUTATIONS[name]
        assert old in source
        source = source.replace(old, new)
    path = tmp_path / "mutated.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutated_verify_{abs(hash(name))}", path)
    assert spec is not None
    assert spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    some = [windows([1 + (seed + i) % 7 for i in range(12)], seed) for seed in range(4)]
    slots = [slots_of(15, seed) for seed in range(4)]
    right = [
        same(run(*given, state, device, mutated.verify), expected(*given, state))
        for given, state in zip(some, slots, strict=True)
    ]
    assert all(right) == (not name)
