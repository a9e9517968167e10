"""What passes are told of the states of their slots, and that states move on by rows that stand alone."""

from __future__ import annotations

import pytest

from detgen.kernels.decoder import StateShape
from detgen.kernels.input_batch import Window, Windows
from detgen.machine import CPU
from detgen.runner.state_cache import MOST_DRAFTED, StateCache

SHAPES = [StateShape(channels=10, taps=3, heads=2, key_heads=1, size=3, values=2), None]


def cache(slots: int = 2) -> StateCache:
    return StateCache(SHAPES, slots, CPU)


def passed(states: StateCache, *windows: Window) -> list[list[int]]:
    """Slot, row, position, tokens, base and certain, of a pass of these windows."""
    spans: list[list[int]] = states.spans(Windows.of(windows)).tolist()
    states.move(Windows.of(windows))
    return spans


def test_a_prompt_a_draft_and_what_stood_of_it() -> None:
    states = cache()
    assert passed(states, Window(0, 0, [1] * 5, 1)) == [[0, 0, 0, 5, 0, 5]]
    assert passed(states, Window(1, 0, [1], 0), Window(0, 5, [2] * 4, 4, 3)) == [[1, 0, 0, 1, 0, 1], [0, 1, 5, 4, 5, 6]]
    assert passed(states, Window(0, 8, [3], 1)) == [[0, 0, 8, 1, 6, 9]]
    assert passed(states, Window(0, 9, [3] * 16, 16, MOST_DRAFTED)) == [[0, 0, 9, 16, 9, 10]]
    assert passed(states, Window(0, 25, [3] * 16, 16, MOST_DRAFTED)) == [[0, 0, 25, 16, 10, 26]]
    assert passed(states, Window(0, 0, [1] * 2, 1)) == [[0, 0, 0, 2, 0, 2]]  # another sequence


def test_rows_of_a_drafter_move_nothing_on() -> None:
    states = cache()
    passed(states, Window(0, 0, [1] * 5, 1))
    assert passed(states, Window(0, 5, [1], 1, 1)) == [[0, 0, 5, 1, 5, 5]]
    assert passed(states, Window(0, 6, [1], 1, 1)) == [[0, 0, 6, 1, 5, 5]]
    assert passed(states, Window(0, 5, [1, 1, 1], 3, 2)) == [[0, 0, 5, 3, 5, 6]]


@pytest.mark.parametrize("window", [Window(0, 4, [1], 1), Window(0, 6, [1] * 31, 31, 30), Window(0, 90, [1], 1)])
def test_where_a_state_is_not(window: Window) -> None:
    """Behind the window's start, or so far before it that rows between are lost."""
    states = cache()
    passed(states, Window(0, 0, [1] * 5, 1))
    with pytest.raises(ValueError, match="slot 0 has states of position 5, from which its window cannot go on"):
        states.spans(Windows.of([window]))


def test_more_slots() -> None:
    """States are kept when there is room for more."""
    states = cache()
    passed(states, Window(1, 0, [1] * 5, 1))
    assert states.layers[0] is not None
    states.layers[0].state[1] = 7.0
    assert passed(states, Window(2, 0, [1], 1), Window(1, 5, [1], 1))[1] == [1, 1, 5, 1, 5, 6]
    assert states.slots == 4
    layer = states.layers[0]
    assert layer is not None
    assert (layer.state[1] == 7).all()
    assert not layer.state[2:].any()
    assert states.layers[1] is None
    assert sum(x.nbytes for x in layer) == 4 * StateCache.slot_bytes(SHAPES)
