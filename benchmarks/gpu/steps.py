"""Steps at the shapes of a model, for the stages about kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from detgen.bench.random_weights import settings_of
from detgen.kernels.c.panels import joined
from detgen.kernels.c.quantizing import Form
from detgen.program import steps
from detgen.program.operands import PAGE, Activation, Buffer, Cache, Into, Step
from gpu.notebook import Asked

_STORED: dict[str, tuple[torch.dtype, Form]] = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "q8": (torch.float32, "q8"),
    "q4": (torch.float32, "q4"),
}


class Made(NamedTuple):
    """A step to run.

    Attributes:
        name: name in words.
        step: the step, with tensors on the CPU.
        moved: bytes of weights, or of keys and values, that it reads.
        operations: operations per row.
    """

    name: str
    step: Step
    moved: int = 0
    operations: float = 0.0


class Shape(NamedTuple):
    """The sizes of a model's steps."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, asked: Asked) -> Shape:
        """Return the sizes of the model that was asked for."""
        found = settings_of(asked.model)
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        size = found.get("head_dim") or hidden // heads
        return cls(hidden, found["intermediate_size"], heads, found["num_key_value_heads"], size)


def made(asked: Asked, positions: int) -> Iterator[Made]:
    """Yield the steps of a layer, with random weights and a cache of that many positions."""
    shape, maker = Shape.of(asked), torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=maker)

    hidden, inner = Buffer("hidden", shape.hidden), Buffer("inner", shape.inner)
    out, gated = Buffer("out", shape.hidden), Buffer("gated", shape.inner)
    for stored, (dtype, form) in _STORED.items():
        for name, x, to, rows in (("o_proj", hidden, out, shape.hidden), ("down_proj", inner, out, shape.hidden)):
            weight = joined([(drawn(rows, x.width) * x.width**-0.5).to(dtype)], [], form)
            step = steps.Linear(name=name, x=x, to=Into(to, add=True), weight=weight)
            yield Made(f"linear {x.width}→{to.width}, {stored}", step, weight.data.nbytes, 2.0 * rows * x.width)
    up = joined([drawn(shape.inner, shape.hidden) * 0.02 for _ in range(2)], [], "q4", gated=True)
    silu = steps.Linear(name="up", x=hidden, to=Into(gated), weight=up, gated=True, activation=Activation.SILU)
    yield Made("gated linear, q4", silu, up.data.nbytes, 4.0 * shape.inner * shape.hidden)
    weight = drawn(shape.hidden)
    how: dict[str, Any] = {"size": shape.hidden, "weight": weight, "epsilon": 1e-5}
    yield Made("norm", steps.Norm(name="norm", x=hidden, to=Into(out), centred=False, **how))
    yield Made("layer norm", steps.Norm(name="norm", x=hidden, to=Into(out), centred=True, bias=weight, **how))
    for function in list(Activation)[1:]:
        step = steps.Activate(name="activation", x=hidden, to=Into(out), function=function)
        yield Made(f"activation {function.name}", step)
    yield from attention(asked, positions)


def attention(asked: Asked, positions: int) -> Iterator[Made]:
    """Yield rotation and attention, with random keys and values of that many positions."""
    shape, maker = Shape.of(asked), torch.Generator().manual_seed(1)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=maker)

    qkv = Buffer("qkv", (shape.heads + 2 * shape.kv_heads) * shape.size)
    pages = -(-positions // PAGE)
    keys, kept = drawn(pages, shape.kv_heads, shape.size, PAGE), drawn(pages, shape.kv_heads, PAGE, shape.size)
    cache = Cache(heads=shape.heads, kv_heads=shape.kv_heads, size=shape.size, values=shape.size, keys=keys, kept=kept)
    angles = drawn(positions, shape.size // 2)
    turned: dict[str, Any] = {"turned": shape.size, "cosines": angles.cos(), "sines": angles.sin()}
    yield Made("rotation", steps.Rotate(name="rotated", qkv=qkv, cache=cache, last=True, **turned))
    for name, bounds in (
        ("", {}),
        (", window 100, capped", {"window": 100, "softcap": 30.0}),
        (", chunks", {"chunk": 96}),
    ):
        to = Buffer("attended", shape.heads * shape.size)
        step = steps.Attend(name="attention", qkv=qkv, cache=cache, to=to, scale=shape.size**-0.5, **bounds)  # type: ignore[arg-type]
        yield Made(f"attention{name}", step, keys.nbytes + kept.nbytes, 4.0 * shape.heads * shape.size * positions)
