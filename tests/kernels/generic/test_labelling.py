"""Labels go where entries go, and clash where an entry is made of two rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from detgen.kernels.generic.labelling import NONE, Labels

aten: Any = torch.ops.aten
ROWS = torch.arange(3, dtype=torch.int32)[:, None].expand(3, 4)


def found(func: Any, *args: Any) -> tuple[list[torch.Tensor], Labels]:
    """Labels of the results where each tensor of three rows of four entries has the labels of its rows."""
    labels = Labels()
    for x in tree_flatten(args)[0]:
        if isinstance(x, torch.Tensor) and x.shape == ROWS.shape:
            labels.know(x, ROWS.clone())
    result = func(*args)
    out = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
    return labels.found(func, args, {}, out, strange=False), labels


x, weight = torch.randn(3, 4), torch.randn(4, 4)


@pytest.mark.parametrize(
    ("func", "args", "want"),
    [
        (aten.transpose.int, (x, 0, 1), ROWS.T),
        (aten.slice.Tensor, (x, 0, 1, 3), ROWS[1:]),
        (aten.flip.default, (x, [0]), ROWS.flip(0)),
        (aten.cat.default, ([x, x], 1), torch.cat([ROWS, ROWS], 1)),
        (aten._to_copy.default, (x,), ROWS),
        (aten.mul.Tensor, (x, 2.0), ROWS),
        (aten.mul.Tensor, (x, weight[0]), ROWS),
        (aten.sum.dim_IntList, (x, [1]), ROWS[:, 0]),
        (aten.mean.dim, (x, [-1], True), ROWS[:, :1]),
        (aten._softmax.default, (x, -1, False), ROWS),
        (aten.sort.default, (x,), ROWS),
        (aten.mm.default, (x, weight), ROWS),
        (aten.index_select.default, (x, 0, torch.tensor([2, 0])), ROWS[[2, 0]]),
        (aten.index.Tensor, (x, [torch.tensor([2, 2])]), ROWS[[2, 2]]),
        (aten.constant_pad_nd.default, (x, [0, 1]), torch.nn.functional.pad(ROWS, (0, 1), value=NONE)),
        (aten.scatter.value, (x, 1, torch.zeros(3, 1, dtype=torch.int64), 0.0), ROWS),
    ],
)
def test_kept_apart(func: Any, args: tuple[Any, ...], want: torch.Tensor) -> None:
    labels, known = found(func, *args)
    assert all(known.mixer(one) is None for one in labels)
    assert torch.equal(labels[0], want)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.sum.default, (x,)),
        (aten.mean.dim, (x, [0])),
        (aten.amax.default, (x, [0], True)),
        (aten.cumsum.default, (x, 0)),
        (aten.sort.default, (x, 0)),
        (aten.mm.default, (weight[:, :3].contiguous(), x)),
        (aten.convolution.default, (x[None], weight[:, :3, None], None, [1], [0], [1], False, [0], 1)),
    ],
)
def test_mixed(func: Any, args: tuple[Any, ...]) -> None:
    labels = Labels()
    for one in tree_flatten(args)[0]:
        if isinstance(one, torch.Tensor) and one.shape[-2:] == ROWS.shape:
            labels.know(one, ROWS.clone().expand(one.shape))
    out = [y for y in tree_flatten(func(*args))[0] if isinstance(y, torch.Tensor)]
    assert labels.mixer(labels.found(func, args, {}, out, strange=False)[0]) == str(func)


def test_another_order_clashes() -> None:
    labels = Labels()
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    labels.know(a, ROWS.clone())
    labels.know(b, ROWS.flip(0).clone())
    (one,) = labels.found(aten.add.Tensor, (a, b), {}, [a], strange=False)
    assert labels.mixer(one[1]) is None
    assert labels.mixer(one) == "aten.add.Tensor"


def test_numbers_that_depend_on_the_rows() -> None:
    """Taint what is made of them."""
    labels = Labels()
    (one,) = labels.found(aten.mul.Tensor, (x, 3.0), {}, [x], strange=True)
    assert labels.mixer(one) == "aten.mul.Tensor"
