"""Linear layers on reordered weights: the right values, and rows that do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from detgen.kernels.linear import PrepackedLinear, can_prepack
from detgen.kernels.probe import same_bits
from detgen.passes.probing import _SIZES as TRIED
from detgen.passes.rewriting import prepack_linears

ROWS = 128
# (in, out): the embedded models', larger ones, and sizes that are no multiple of a vector.
SIZES = [(256, 704), (704, 256), (64, 96), (50, 33), (256, 4096), (1536, 512), (2048, 256)]


def weights(size: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight [out, in], bias [out] and inputs [ROWS, in]."""
    g = torch.Generator().manual_seed(seed)
    inner, outer = size
    weight = torch.randn(outer, inner, generator=g) * inner**-0.5
    return weight, torch.randn(outer, generator=g), torch.randn(ROWS, inner, generator=g)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_linear(size: tuple[int, int], biased: bool) -> None:
    """The packed product is F.linear's to rounding, for inputs of any number of axes."""
    weight, bias, x = weights(size)
    packed = PrepackedLinear(weight, bias if biased else None)
    want = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    for shape in ((ROWS, -1), (1, ROWS, -1), (4, 32, -1)):
        out = packed(x.view(*shape))
        assert (out.view(ROWS, -1) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("size", SIZES)
def test_rows_do_not_depend_on_their_number(size: tuple[int, int]) -> None:
    """Where the row counts that the probe tries agree, for 1 and 2 threads, so do all others between them."""
    weight, bias, x = weights(size)
    packed = PrepackedLinear(weight, bias)
    torch.set_num_threads(1)
    whole = packed(x[None])[0]

    def wrong(counts: Iterable[int]) -> list[tuple[int, int]]:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in counts:
                first, last = packed(x[None, :rows])[0], packed(x[None, ROWS - rows :])[0]
                if not same_bits(first, whole[:rows]) or not same_bits(last, whole[ROWS - rows :]):
                    found.append((rows, threads))
        return found

    if wrong([n for n in TRIED if n >= 4]):
        pytest.skip("several classes on this machine, so detgen runs no row count but those that were tried")
    assert not wrong(range(4, ROWS + 1))


class Siblings(nn.Module):
    """The names that transformers' attention and feed-forward modules give their layers."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(64, 48, bias=bias)
        self.k_proj = nn.Linear(64, 16, bias=bias)
        self.v_proj = nn.Linear(64, 32, bias=bias)
        self.o_proj = nn.Linear(48, 64, bias=bias)


def packed_siblings(bias: bool) -> nn.Module:
    """The same weights, joined."""
    model = nn.ModuleDict({"self_attn": Siblings(bias)})
    assert prepack_linears(model) == 4
    return model["self_attn"]


def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = layer(x)
    return out.clone()


@pytest.mark.parametrize("bias", [False, True])
@examples(30)
@given(calls=st.lists(st.tuples(st.sampled_from(["q_proj", "k_proj", "v_proj"]), st.integers(0, 2)), max_size=12))
def test_siblings_in_any_order(bias: bool, calls: list[tuple[str, int]]) -> None:
    """Joined layers give what separate ones give, called in whatever order, however often, on whatever inputs."""
    model, plain = packed_siblings(bias), Siblings(bias)
    g = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, 8, 64, generator=g) for _ in range(3)]
    for name, i in calls:
        want = run(plain.get_submodule(name), inputs[i])
        torch.testing.assert_close(run(model.get_submodule(name), inputs[i]), want, rtol=1e-5, atol=1e-5)


def test_siblings_share_one_product() -> None:
    """Query, key and value of one input take one product; the next input a new one."""
    model = packed_siblings(False)
    seen: list[int] = []
    first: Any = model.get_submodule("q_proj")
    first.joined.linear.register_forward_hook(lambda *_: seen.append(1))
    for x in (torch.randn(1, 8, 64), torch.randn(1, 8, 64)):
        for name in ("q_proj", "k_proj", "v_proj"):
            run(model.get_submodule(name), x)
    assert len(seen) == 2


def test_siblings_on_equal_inputs_in_turn() -> None:
    """A new tensor is never taken for the one before, even if it takes its place in memory."""
    model, plain = packed_siblings(False), Siblings(False)
    layer = model.get_submodule("q_proj")
    for i in range(50):
        x = torch.full((1, 4, 64), float(i + 1))
        torch.testing.assert_close(run(layer, x), run(plain.q_proj, x), rtol=1e-5, atol=1e-4)
        del x


def test_transposed_layers_of_gpt2() -> None:
    """Conv1D, a linear layer with its weight transposed, is packed with the same result."""
    model = nn.ModuleDict({"c_attn": Conv1D(96, 64), "c_proj": Conv1D(64, 32)})
    g = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data.normal_(generator=g)
    x = torch.randn(1, 7, 64, generator=g)
    want = model["c_attn"](x)
    assert prepack_linears(model) == 2
    assert isinstance(model["c_attn"], PrepackedLinear)
    torch.testing.assert_close(run(model["c_attn"], x), want.detach(), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_stays() -> None:
    """Other classes of layers and other dtypes keep their own product."""

    class Quantized(nn.Linear):
        pass

    model = nn.ModuleDict({"a": Quantized(8, 8), "b": nn.Linear(8, 8).double(), "c": nn.Linear(8, 8)})
    assert prepack_linears(model) == 1
    assert type(model["a"]) is Quantized
    assert type(model["b"]) is nn.Linear
    assert not can_prepack(torch.zeros(8, 8, dtype=torch.float16))
    assert not can_prepack(torch.zeros(8, 8, device="meta"))


def test_a_tied_embedding_stays() -> None:
    """The output layer that shares its weight with the embedding is packed; the embedding goes on as it was."""
    model = nn.ModuleDict({"embed": nn.Embedding(40, 16), "lm_head": nn.Linear(16, 40, bias=False)})
    lm_head: Any = model["lm_head"]
    lm_head.weight = model["embed"].weight
    table = lm_head.weight.detach().clone()
    prepack_linears(model)
    assert torch.equal(run(model["embed"], torch.arange(40)), table)
    x = torch.randn(1, 4, 16)
    torch.testing.assert_close(run(model["lm_head"], x), x @ table.T, rtol=1e-5, atol=1e-5)
