"""Masks are being made within `making`, and by nobody when it is left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from detgen.engine.mask_making import MaskMaker
from detgen.kernels.input_batch import Windows


class _Live:
    """Two slots, the second with a form; making its masks waits until the pass has ended, or fails."""

    formed = np.array([False, True])

    def __init__(self, fault: BaseException | None = None) -> None:
        self.made: list[list[int]] = []
        self.ended, self._fault = threading.Event(), fault

    def __getitem__(self, slot: int) -> _Live:
        assert slot == 1, "only sequences whose texts have forms are asked"
        return self

    def make_masks(self, draft: list[int]) -> None:
        assert self.ended.wait(10)
        if self._fault is not None:
            raise self._fault
        self.made.append(draft)


def windows(logits: list[int]) -> Windows:
    """A window of one token, and one with a draft of two."""
    of: list[Any] = [np.array(x) for x in ([0, 1], [4, 5], [1, 3], logits, [1, 2, 3, 4])]
    return Windows(*of)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), RuntimeError("of the pass")])
def test_they_are_made_when_it_is_left(error: BaseException | None) -> None:
    """However the pass ends: whoever goes on, or begins again, is alone with the sequences."""
    live: Any = _Live()
    caught: BaseException | None = None
    try:
        with MaskMaker(live, every=True).making(windows([1, 3])):
            assert not live.made
            live.ended.set()
            if error is not None:
                raise error
    except BaseException as e:
        caught = e
    assert caught is error
    assert live.made == [[3, 4]]


def test_a_failure_is_that_of_the_pass() -> None:
    live: Any = _Live(MemoryError("of a mask"))
    live.ended.set()
    maker = MaskMaker(live, every=True)
    with pytest.raises(MemoryError, match="of a mask"), maker.making(windows([1, 3])):
        pass
    live._fault = None
    with maker.making(windows([1, 3])):
        pass
    assert live.made == [[3, 4]], "and the next pass's are made"


def test_who_chooses_while_the_pass_runs_waits() -> None:
    live: Any = _Live()
    with MaskMaker(live, every=True).making(windows([1, 3])) as made:
        live.ended.set()
        made()
        assert live.made == [[3, 4]]


def test_nothing_starts_where_no_row_needs_a_mask() -> None:
    live: Any = _Live()
    with MaskMaker(live, every=True).making(windows([1, 0])):
        pass
    assert not live.made
