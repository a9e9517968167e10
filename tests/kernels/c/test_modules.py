"""Native modules give the bits of the stated arithmetic, and tell who watches what they read and write."""

from __future__ import annotations

import pytest
import torch

from detgen.kernels.c import modules
from detgen.kernels.c.call import watching
from detgen.program.arithmetic import fma, gelu, linear, norm, silu, softmax, total
from detgen.program.arrays import same_bits
from detgen.program.operands import Activation


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype: torch.dtype) -> None:
    x, weight, bias = numbers(1, 2, 3, 21), numbers(2, 37, 21).to(dtype), numbers(3, 37)
    out = modules.NativeLinear(weight, bias)(x)
    assert same_bits(out, linear(x, weight.float().t()) + bias)


@pytest.mark.parametrize("centred", [False, True])
def test_norm(centred: bool) -> None:
    x, weight, bias = numbers(1, 4, 3, 20), numbers(2, 20), numbers(3, 20)
    for own in ((None, None), (weight, None), (weight, bias)):
        out = modules.NativeNorm(20, *own, 1e-5, centred=centred)(x)
        assert same_bits(out, norm(x, *own, 1e-5, centred=centred))
    each = numbers(4, 3, 20)  # each head has its own
    out = modules.NativeNorm(20, each, None, 1e-5, centred=centred)(x)
    assert same_bits(out, norm(x, each, None, 1e-5, centred=centred))


def test_rows_of_any_width() -> None:
    for width in (1, 5, 40):
        x = numbers(1, 2, 3, width)
        assert same_bits(modules.by_softmax()(x), softmax(x))
        assert same_bits(modules.by_sum()(x), total(x)[..., None])
        assert same_bits(modules.NativeActivation(Activation.GELU)(x), gelu(x))
    turned = numbers(1, 7, 6).t()
    assert same_bits(modules.by_sum()(turned), total(turned.contiguous())[..., None])


@pytest.mark.parametrize("joined", [False, True])
def test_feed_forward(joined: bool) -> None:
    x, gate, up, down = numbers(1, 1, 5, 12), numbers(2, 20, 12), numbers(3, 20, 12), numbers(4, 12, 20)
    first = [torch.cat([gate, up])] if joined else [gate, up]
    out = modules.NativeFeedForward((first, []), (down, None), Activation.SILU, gated=True)(x)
    assert same_bits(out, linear(silu(linear(x, gate.t())) * linear(x, up.t()), down.t()))


def test_experts() -> None:
    """In order of their numbers, whatever the order in which they were chosen."""
    x, up, down = numbers(1, 5, 12), numbers(2, 4, 16, 12), numbers(3, 4, 12, 8)
    chosen, weights = torch.tensor([[2, 0], [3, 1], [0, 1], [1, 2], [3, 0]]), numbers(4, 5, 2).abs()
    out = modules.NativeExperts(up, down, Activation.SILU)(x, chosen, weights)
    order = chosen.sort(-1)
    gates, opened = linear(x[:, None], up.mT[order.values]).chunk(2, -1)
    results = linear(silu(gates) * opened, down.mT[order.values])
    first, second = weights.gather(-1, order.indices).unbind(-1)
    want = fma(results[:, 0], first[:, None], torch.zeros(5, 12))
    assert same_bits(out, fma(results[:, 1], second[:, None], want))


def test_angles_of_any_position() -> None:
    """Tables grow with what is asked of them."""
    one = modules.NativeAngles({None: (torch.tensor([1.0, 0.01]).numpy(), 1.0)}, torch.tensor([0, 1, 0, 1]))
    positions = torch.tensor([[3, 5000, 0]])
    cosines, sines = one(torch.empty(0), positions)
    angles = positions[..., None] * torch.tensor([1.0, 0.01, 1.0, 0.01])
    assert (cosines - angles.cos()).abs().max() < 1e-5
    assert (sines - angles.sin()).abs().max() < 1e-5


def test_no_rows() -> None:
    assert modules.NativeLinear(numbers(1, 4, 3))(torch.empty(0, 3)).shape == (0, 4)


def test_who_watches_is_told() -> None:
    told = []
    layer, x = modules.NativeLinear(numbers(1, 4, 3)), numbers(2, 5, 3)
    with watching(lambda *args: told.append(args)):
        out = layer(x)
    layer(x)
    ((reads, writes, rows),) = told
    assert same_bits(reads[0], x)
    assert same_bits(writes[0], out)
    assert rows is None
