"""Work that is recorded where there are no graphs: what a graph could not do again is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from detgen.kernels.triton.replaying import Calls, replaying


def test_it_reads_what_its_tensors_hold_now() -> None:
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        twice = x * 2
        out.copy_(twice + twice.view(2))

    work()
    replay = Calls().record(work)
    for value in (3.0, 5.0):
        x.fill_(value)
        replay()
        assert out.tolist() == [4 * value] * 2


def test_a_part_of_a_tensor_is_the_same_memory() -> None:
    x, out = torch.arange(4.0), torch.zeros(2)

    def work() -> None:
        out.copy_(x[2:])

    replay = Calls().record(work)
    x += 1
    replay()
    assert out.tolist() == [3.0, 4.0]


def moved(held: dict[str, torch.Tensor]) -> None:
    held["x"] = held["x"].clone()


def made(held: dict[str, torch.Tensor]) -> None:
    held["y"] = torch.ones(2)


@pytest.mark.parametrize("change", [moved, made])
def test_a_tensor_that_was_not_there_is_refused(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """One with the same numbers at another place, and one that is new."""
    held = {"x": torch.ones(2)}
    out = torch.zeros(2)

    def work() -> None:
        out.copy_(held["x"] + held.get("y", held["x"]))

    replay = Calls().record(work)
    replay()
    kept = dict(held)
    change(held)
    with pytest.raises(RuntimeError, match="was not there when it was recorded"):
        replay()
    assert kept


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool((x > 0).all())])
def test_looking_at_numbers_is_refused(look: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2)

    def work() -> None:
        look(x)

    with pytest.raises(RuntimeError, match="cannot look at numbers"):
        Calls().record(work)


def test_there_are_graphs_on_cuda_alone() -> None:
    assert isinstance(replaying(torch.device("cpu")), Calls)
