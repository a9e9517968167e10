"""Replaces the modules of any transformers model by modules in the arithmetic `detgen-2`.

What a module computes is guessed from its parts and checked: the replacement must give the results of the module's own
forward. Unrecognized modules stay, for the census to judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from detgen.kernels.c.modules import (
    NativeActivation,
    NativeAngles,
    NativeExperts,
    NativeFeedForward,
    NativeLinear,
    NativeNorm,
)
from detgen.kernels.c.quantizing import STORAGE
from detgen.models.activations import ACTIVATIONS
from detgen.models.rotary import rotary_of
from detgen.models.stored import held
from detgen.models.widened_forward import widened
from detgen.program.operands import Activation, name_of

_CLOSE = 1e-4  # relative to the largest entry; both round
# Scales of the input rows that are compared: trained models have rows in the hundreds, where a clamp would show.
_SCALES = (1e-3, 1.0, 10.0, 100.0, 1000.0)
ROWS = len(_SCALES)
_POSITIONS = 40
# Names of a feed-forward's linear layers: a gate, what it opens and the last; both in one, then the last; no gate.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_UNGATED = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"))
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# Of modules by themselves; those that linear layers and experts may have are the others.
_ALONE = {"Sigmoid": Activation.SIGMOID, "Tanh": Activation.TANH}

# A possible replacement: a function that makes it, and inputs for which both must give the same.
_Candidate = tuple[Callable[[], nn.Module], list[tuple[Any, ...]]]


@torch.no_grad()
def replace_modules(model: nn.Module, kept: Collection[str] = ()) -> None:
    """Replace recognized modules in place; widen the rest of the model from 16 bits to float32.

    Args:
        model: on the CPU, its weights in float32 or in 16 bits.
        kept: names of modules to keep.
    """
    chosen: dict[object, int | None] = {}  # the chosen candidate of each kind of module
    for find in (_feed_forwards, _experts, _linears, _norms, _activations, _angles):
        gone = "no module's parts"
        for name in [name for name, _ in model.named_modules() if name]:
            if name in kept or name.startswith(gone):
                continue
            module = model.get_submodule(name)
            candidates = list(find(module))
            key = find, kind_of(module)
            if key not in chosen or find is _angles:
                chosen[key] = next((i for i, one in enumerate(candidates) if _alike(module, *one)), None)
            index = chosen[key]
            if index is not None:
                made = candidates[index][0]()
                if isinstance(weight := getattr(module, "weight", None), torch.Tensor):
                    # Some forwards look at the number format that a module computes in.
                    made.weight = torch.empty(weight.shape, device="meta")
                model.set_submodule(name, made)
                gone = f"{name}."
    model.float()


def kind_of(module: nn.Module) -> object:
    """Return what modules that compute the same with other weights have in common: class, settings and shapes."""
    kinds = bool, int, float, str, list, tuple
    own = [(n, repr(x)) for n, x in vars(module).items() if isinstance(x, kinds) and n != "layer_idx"]
    config = id(getattr(module, "config", None))  # of one layer, in some models
    return type(module), config, *own, *((n, p.shape) for n, p in module.named_parameters())


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale the rows of an input, ROWS along its second axis, to the scales that are compared."""
    return x * torch.tensor(_SCALES).to(x).view(-1, *[1] * (x.ndim - 2))


def close(own: torch.Tensor, made: torch.Tensor, limit: float) -> bool:
    """Return whether each row of a result is the module's own, up to `limit` of the row's largest entry.

    Rows that overflow the module's own number format are not compared.
    """
    off = (own - made).abs().amax(-1) <= limit * own.abs().amax(-1)
    return bool((off | ~own.isfinite().all(-1)).all())


def _alike(module: nn.Module, make: Callable[[], nn.Module], inputs: list[tuple[Any, ...]]) -> bool:
    """Return whether a module's own forward and the candidate give the same results."""
    made = make()
    with widened(module, held):
        for args in inputs:
            try:
                own = module(*args)
            except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other arguments
                return False
            pairs = (x if isinstance(x, tuple) else (x,) for x in (own, made(*args)))
            for a, b in zip_longest(*pairs):
                if a is None or b is None or a.shape != b.shape or not close(a, b, _CLOSE):
                    return False
    return True


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class LinearParts(NamedTuple):
    """The parts of a linear layer: its weight, [outputs, inputs], and its bias, [outputs], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def linear_of(module: nn.Module) -> LinearParts | None:
    """Return the parts of a plain linear layer, including GPT-2's transposed `Conv1D`; None for other modules."""
    found: Any = module
    transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if (type(module) is not nn.Linear and not transposed) or name_of(found.weight.dtype) not in STORAGE:
        return None
    return LinearParts(found.weight.t() if transposed else found.weight, found.bias)


def _activation(module: nn.Module) -> Activation | None:
    return ACTIVATIONS.get(type(module).__name__)


class FeedForwardParts(NamedTuple):
    """The possible parts of a feed-forward: its first linear layers, its last one, and the activation between them."""

    up: list[LinearParts]
    down: LinearParts
    activation: Activation
    gated: bool


def feed_forwards_of(module: nn.Module) -> Iterator[FeedForwardParts]:
    """Yield what a module may be; nothing if it is no feed-forward."""
    children = {n: m for n, m in module.named_children() if type(m) is not nn.Dropout}
    activations = [a for m in children.values() if (a := _activation(m)) is not None]
    linears = {name: found for name, m in children.items() if (found := linear_of(m)) is not None}
    plain = len(children) == len(linears) + 1 and not list(module.parameters(recurse=False))
    names = next((names for names in (*_GATED, *_UNGATED) if set(names) == linears.keys()), None)
    if len(activations) != 1 or not plain or names is None:
        return
    *first, down = (linears[name] for name in names)
    if len({linear.bias is None for linear in first}) > 1:
        return
    inner = sum(len(linear.weight) for linear in first)
    for gated in (False, True):
        if inner == (1 + gated) * down.weight.shape[1] and (gated or len(first) == 1):
            yield FeedForwardParts(first, down, activations[0], gated)


def _feed_forwards(module: nn.Module) -> Iterator[_Candidate]:
    for first, down, activation, gated in feed_forwards_of(module):
        up = [linear.weight for linear in first], [linear.bias for linear in first if linear.bias is not None]
        x = scaled(_random(1, ROWS, up[0][0].shape[1]))
        yield partial(NativeFeedForward, up, (down.weight, down.bias), activation, gated=gated), [(x,)]


def _experts(module: nn.Module) -> Iterator[_Candidate]:
    parameters = dict(module.named_parameters())
    activations = [a for m in module.children() if (a := _activation(m)) is not None]
    if parameters.keys() != {"gate_up_proj", "down_proj"} or len(activations) != 1:
        return
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if up.ndim != 3 or down.ndim != 3 or up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return
    if name_of(up.dtype) not in STORAGE:
        return
    count, width, _ = down.shape
    picks = min(2, count)
    chosen = torch.stack([torch.arange(picks).add(row).remainder(count) for row in range(ROWS)])
    inputs = [(scaled(_random(1, ROWS, width))[0], chosen, _random(ROWS, picks).abs())]
    yield partial(NativeExperts, up, down, activations[0]), inputs


def _linears(module: nn.Module) -> Iterator[_Candidate]:
    if (found := linear_of(module)) is not None:
        yield partial(NativeLinear, *found), []


class NormParts(NamedTuple):
    """The possible parts of a norm: the shape of its weight, weight and bias in float32, or None, and the rest."""

    shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    centred: bool


def norms_of(module: nn.Module) -> Iterator[NormParts]:
    """Yield what a module may be; nothing if it is no norm."""
    epsilon = next(
        (getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None
    )
    parameters = dict(module.named_parameters())
    if "norm" not in type(module).__name__.lower() or epsilon is None or parameters.keys() - {"weight", "bias"}:
        return
    if len(inspect.signature(module.forward).parameters) != 1:
        return
    weight = None if "weight" not in parameters else parameters["weight"].float()
    bias = parameters.get("bias")
    shape = tuple(getattr(module, "normalized_shape", ()))[-1:] if weight is None else tuple(weight.shape)
    if not 1 <= len(shape) <= 2:
        return
    for centred in (False, True):
        for one in (weight,) if weight is None else (weight, 1 + weight):
            if bias is None or one is not None:
                yield NormParts(shape, one, bias, epsilon, centred)


def _norms(module: nn.Module) -> Iterator[_Candidate]:
    for shape, weight, bias, epsilon, centred in norms_of(module):
        x = scaled(_random(1, ROWS, *shape) + 0.5)
        yield partial(NativeNorm, shape[-1], weight, bias, epsilon, centred=centred), [(x,)]


def _activations(module: nn.Module) -> Iterator[_Candidate]:
    if (found := _activation(module) or _ALONE.get(type(module).__name__)) is not None:
        yield partial(NativeActivation, found), [(scaled(_random(1, ROWS, 64)),)]


def _angles(module: nn.Module) -> Iterator[_Candidate]:
    if hasattr(module, "mrope_section"):  # angles of three positions per token
        return
    kinds = getattr(module, "rope_type", ())
    kinds = (None,) if isinstance(kinds, str) else tuple(kinds)
    found = {kind: rotary for kind in kinds if (rotary := rotary_of(module, kind)) is not None}
    if not found or len(found) < len(kinds) or len({len(rotary.frequencies) for rotary in found.values()}) > 1:
        return
    along = torch.arange(len(found[kinds[0]].frequencies))
    x, positions = _random(1, _POSITIONS, 2), torch.arange(_POSITIONS)[None]
    inputs: list[tuple[Any, ...]] = [(x, positions) if kind is None else (x, positions, kind) for kind in kinds]
    for order in (torch.cat([along, along]), along.repeat_interleave(2), along):
        yield partial(NativeAngles, found, order, module.config), inputs
