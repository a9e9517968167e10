"""Replaces a model's modules by row-invariant ones.

Knows the classes of transformers by name; others stay as they are, and the probe judges them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from detgen.kernels.activation import RowwiseActivation
from detgen.kernels.experts import PrepackedExperts
from detgen.kernels.linear import Joined, JoinedLinear, PrepackedLinear, can_prepack
from detgen.kernels.norm import FusedRMSNorm

# Sibling modules that transformers' models call one after the other on the same tensor.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Modules of activation functions.
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
# Classes that compute what `FusedRMSNorm` does; others, such as Gemma's 1 + weight, stay.
_PLAIN_NORMS = {
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "MixtralRMSNorm",
    "Olmo2RMSNorm",
    "Phi3RMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "SmolLM3RMSNorm",
    "GraniteRMSNorm",
}
# Classes with gate_up_proj [experts, 2 * inner, hidden], down_proj [experts, hidden, inner] and no biases.
_PLAIN_EXPERTS = {"MixtralExperts", "OlmoeExperts", "Qwen2MoeExperts", "Qwen3MoeExperts"}


def prepack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer of `model` by a prepacked one, siblings by one joined product, in place.

    Quantized layers (other classes) stay. An embedding that shares its weight with the output layer keeps it.

    Returns:
        How many layers were replaced.
    """
    found = {name: (weight, bias) for name, weight, bias in _linears(model) if can_prepack(weight)}
    count = len(found)
    for parent in sorted({name.rpartition(".")[0] for name in found}):
        for names in _SIBLINGS:
            paths = [f"{parent}.{n}" for n in names]
            layers = [found[p] for p in paths if p in found]
            alike = {(w.shape[1], w.dtype, b is None) for w, b in layers}  # all or none with a bias
            if len(layers) == len(paths) and len(alike) == 1:
                _join(model, paths, layers)
                found = {p: layer for p, layer in found.items() if p not in paths}
    for name, (weight, bias) in found.items():
        model.set_submodule(name, PrepackedLinear(weight, bias))
    return count


def _join(model: nn.Module, paths: list[str], layers: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Replace the layers at these paths, given as weights and biases, by one joined product."""
    biases = [b for _, b in layers if b is not None]
    joined = Joined(PrepackedLinear(torch.cat([w for w, _ in layers]), torch.cat(biases) if biases else None))
    first = 0
    for path, (weight, _) in zip(paths, layers, strict=True):
        model.set_submodule(path, JoinedLinear(joined, first, first + weight.shape[0], len(paths)))
        first += weight.shape[0]


def _linears(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Name, weight [out, in] and bias of each plain linear layer, GPT-2's transposed `Conv1D` among them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module.weight, module.bias
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            yield name, module.weight.t(), module.bias


def fuse_norms(model: nn.Module) -> int:
    """Replace the float32 root-mean-square norms of `model` on the CPU, in place; returns how many."""

    def fits(module: Any) -> bool:
        plain = type(module).__name__ in _PLAIN_NORMS
        return plain and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"

    return _replace(model, fits, lambda m: FusedRMSNorm(m.weight, m.variance_epsilon))


def align_activations(model: nn.Module) -> int:
    """Replace the activation modules of `model`, in place; returns how many."""
    return _replace(model, lambda m: type(m).__module__ in _ACTIVATIONS, RowwiseActivation)


def prepack_experts(model: nn.Module) -> int:
    """Replace the expert layers of known classes, in place; returns how many. The probe judges the others."""
    return _replace(
        model,
        lambda m: type(m).__name__ in _PLAIN_EXPERTS and can_prepack(m.gate_up_proj) and can_prepack(m.down_proj),
        lambda m: PrepackedExperts(m.gate_up_proj.detach(), m.down_proj.detach(), m.act_fn),
    )


def _replace(model: nn.Module, fits: Callable[[Any], bool], make: Callable[[Any], nn.Module]) -> int:
    """Replace each module that fits by what `make` makes of it, in place; returns how many."""
    found = [(name, module) for name, module in model.named_modules() if fits(module)]
    for name, module in found:
        model.set_submodule(name, make(module))
    return len(found)
