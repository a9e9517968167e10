"""Snapshots case by case: what is copied, up to where they are found, which go first, when they are found no more."""

from __future__ import annotations

import numpy as np
import pytest

from detgen.kernels.decoder import LayerStates, StateShape
from detgen.machine import CPU
from detgen.program.arrays import same_bits
from detgen.runner.block_manager import PAGE, BlockManager, Prefix
from detgen.runner.snapshots import Snapshots
from detgen.runner.state_cache import StateCache

# Of a recurrence, without any, of a convolution alone, of one that reads no row again.
SHAPES = [
    StateShape(channels=10, taps=3, heads=2, key_heads=1, size=3, values=2),
    None,
    StateShape(channels=6, taps=4),
    StateShape(channels=5, taps=1),
]


def made(count: int = 2, slots: int = 4, pages: int = 8) -> Snapshots:
    """Slots that have states of their own, each at the end of the first block."""
    states = StateCache(SHAPES, slots, CPU)
    maker = np.random.default_rng(0)
    for layer in states.layers:
        for buffer in layer or ():
            buffer[...] = maker.standard_normal(buffer.shape, np.float32)
    states.at[:] = PAGE
    return Snapshots(states, BlockManager(pages), count, CPU)


def layer_of(snapshots: Snapshots, layer: int) -> LayerStates:
    found = snapshots.states.layers[layer]
    assert found is not None
    return found


def pages_of(snapshots: Snapshots, *pages: int) -> Prefix:
    return snapshots.shared(Prefix(list(pages), -1, PAGE * len(pages), False))


@pytest.mark.parametrize("position", [PAGE, 7 * PAGE])
def test_what_is_copied(position: int) -> None:
    """The states, and the rows before the position that are convolved again; all of it by its bits."""
    snapshots = made()
    snapshots.states.at[1] = position
    snapshots.keep(1, position, page=5)
    want = [[x[1].copy() for x in layer or ()] for layer in snapshots.states.layers]
    for layer in snapshots.states.layers:
        for buffer in layer or ():
            buffer[1] = np.nan  # what the slot does then is not the snapshot's
    snapshots.restore(3, Prefix([*range(position // PAGE - 1), 5], -1, position, False))
    assert snapshots.states.at.tolist() == [PAGE, position, PAGE, position]
    for i, shape in enumerate(SHAPES):
        if shape is not None:
            layer = layer_of(snapshots, i)
            assert same_bits(layer.state[3], want[i][1])
            rows = [p % layer.convolved.shape[1] for p in range(position - shape.taps + 1, position)]
            assert same_bits(layer.convolved[3, rows], want[i][0][rows])


def test_restored_into_a_slot_beyond_the_others() -> None:
    snapshots = made(slots=1)
    snapshots.keep(0, PAGE, page=0)
    snapshots.restore(5, pages_of(snapshots, 0))
    assert snapshots.states.slots == 6
    assert same_bits(layer_of(snapshots, 0).state[5], layer_of(snapshots, 0).state[0])


def test_no_snapshot_where_the_states_are_not() -> None:
    """Not even a row too early or too late, or of rows that may not stand."""
    snapshots = made()
    for at in (PAGE - 1, PAGE + 1, 2 * PAGE):
        snapshots.states.at[0] = at
        with pytest.raises(ValueError, match=f"slot 0 has states of position {at}, so there is no snapshot of pos"):
            snapshots.keep(0, PAGE, page=0)
    assert not snapshots.shared(Prefix([0], -1, PAGE, False)).pages


def test_shared_up_to_the_last_block_end_that_has_one() -> None:
    snapshots = made()
    snapshots.keep(0, PAGE, page=6)
    for pages, shared in {(): 0, (6,): 1, (2, 6): 2, (6, 2, 3): 1, (2, 3): 0}.items():
        for pending in (False, True):
            prefix = Prefix(list(pages), 4, PAGE * len(pages) + 9, pending)
            assert snapshots.shared(prefix) == (list(pages[:shared]), -1, PAGE * shared, pending)


def kept(snapshots: Snapshots, count: int) -> list[int]:
    """Which of the first pages have a snapshot."""
    return [page for page in range(count) if pages_of(snapshots, page).pages]


def test_the_least_recently_used_goes_first() -> None:
    """There are never more than there are places; one that is asked for again counts as used."""
    snapshots = made(count=3)
    for page in (0, 1, 2):
        snapshots.keep(0, PAGE, page)
    snapshots.keep(0, PAGE, 0)
    snapshots.keep(2, PAGE, 3)
    assert kept(snapshots, 8) == [0, 2, 3]
    snapshots.restore(1, pages_of(snapshots, 3))
    assert same_bits(layer_of(snapshots, 0).state[1], layer_of(snapshots, 0).state[2])
    snapshots.restore(1, pages_of(snapshots, 0))
    assert same_bits(layer_of(snapshots, 0).state[1], layer_of(snapshots, 0).state[0])


def test_those_that_were_restored_stay_longer() -> None:
    """Half of the places are for them, the last ones."""
    snapshots = made(count=4)
    for page in range(4):
        snapshots.keep(0, PAGE, page)
    for page in (0, 1, 2):
        snapshots.restore(1, pages_of(snapshots, page))
    for page in range(4, 8):
        snapshots.keep(0, PAGE, page)
    assert kept(snapshots, 8) == [1, 2, 6, 7]


def test_a_page_that_is_taken_again_has_none() -> None:
    """Nor does the place of its snapshot, which another page then has, come back to it."""
    snapshots = made(count=1, pages=1)
    pages = snapshots._pages
    tokens = list(range(PAGE))
    keys = pages.keys(tokens)
    for forget in (lambda: pages.release(0), lambda: (pages.release(0), pages.forget()), lambda: pages.lay_out(1, 1)):
        pages.take(0, 1)
        pages.fill(0, tokens, PAGE, keys)
        snapshots.keep(0, PAGE, page=0)
        assert pages_of(snapshots, 0).pages
        forget()
        if forget.__code__.co_names[-1] != "lay_out":
            pages.take(0, 1)  # the only page there is
        assert not pages_of(snapshots, 0).pages
        pages.release(0)


def test_a_place_is_not_taken_from_a_page_that_has_another() -> None:
    snapshots = made(count=2)
    snapshots.keep(0, PAGE, page=0)
    snapshots._pages.snapshots[0] = 0  # as if it were taken for new content
    snapshots.keep(1, PAGE, page=0)
    snapshots.keep(2, PAGE, page=1)  # in the first place, which page 0 had
    snapshots.restore(3, pages_of(snapshots, 0))
    assert same_bits(layer_of(snapshots, 0).state[3], layer_of(snapshots, 0).state[1])


def test_bytes() -> None:
    """What the places take, as it is counted."""
    snapshots = made(count=5)
    assert sum(x.nbytes for layer in snapshots._copies for x in layer or ()) == 5 * Snapshots.bytes(SHAPES)


def test_an_interruption_leaves_no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is found once all of it is there; its place is used again."""
    snapshots = made(count=1)
    snapshots.keep(0, PAGE, page=0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", interrupt)
        with pytest.raises(KeyboardInterrupt):
            snapshots.keep(1, PAGE, page=1)
    assert not pages_of(snapshots, 0).pages
    assert not pages_of(snapshots, 1).pages
    snapshots.keep(2, PAGE, page=2)
    assert pages_of(snapshots, 2).pages
