"""Runs forwards of models with lazy weights, or weights in fewer bits, by widening one module at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import MADE, Form, narrowed
from detgen.models.latent import narrowed_by_head
from detgen.models.stored import Read, taken, turned, whole
from detgen.program.arrays import array, floats, tensor

_AT_A_TIME = 1 << 22  # entries of a linear layer widened at once
# Modules that round the input of a module in them to its weights' number format, and that module's name.
_ROUNDING = {
    **dict.fromkeys(("NemotronHBlock", "MambaBlock", "FalconMambaBlock", "Mamba2Block"), "norm"),
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"), "lm_head"),
}
# Ends of names of linear layers that are never quantized.
_LIKE_ROUTERS = (
    *("shared_expert_gate", "gate.wg", "router.proj", "router.gate"),
    *("modality_router", "prediction_coefs", "correction_coefs"),  # Gemma 3n's
    "mixer.dt_proj",
    "mamba.dt_proj",
)


@contextmanager
def widened(model: nn.Module, read: Read, form: Form = "none") -> Iterator[None]:
    """Inside the block, modules compute with their own parameters in float32, of one module or less at a time.

    Only the rows needed are read of token embeddings, and a linear layer is read some rows at a time.

    Args:
        model: a decoder, or a part of one.
        read: reads the weight of a parameter.
        form: the later form of linear layers and experts; quantized weights take the values that they will have.
    """
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)  # a part of a model may not have any
    embedding = embeddings()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            own = _own(module)
            if not any(p.dtype.itemsize == 2 or p.device.type == "meta" or form in MADE for p in own.values()):
                continue
            if type(module) is nn.Conv1d:
                continue
            if type(module) is nn.Linear:
                few: Form = "none" if name.endswith(_LIKE_ROUTERS) else form
                narrow, rows = partial(narrowed, form=few), 1
                if name.endswith("kv_b_proj") and few in MADE:
                    heads: Any = model.get_submodule(name.rpartition(".")[0])
                    rows = heads.qk_nope_head_dim + heads.v_head_dim
                    narrow = partial(narrowed_by_head, form=few, size=rows, plain=heads.qk_nope_head_dim)
                module.__dict__["forward"] = partial(_product, module, own, name, read, narrow, rows)
                hooks.callback(delattr, module, "forward")
                if name == _ROUNDING.get(type(model).__name__):
                    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
                    hooks.callback(_restore, own, module, None, None)
                continue
            if hasattr(module, "mup_vector"):  # Falcon H1's factors, in the model's number format
                hooks.callback(setattr, module, "mup_vector", module.mup_vector)
                module.mup_vector = sys.modules[type(module).__module__].compute_mup_vector(model.config)
            if hasattr(module, "correct_output_scale"):  # Gemma 3n's, which is read outside the module's call
                _widen(own, name, read, "none", module, None)
                hooks.callback(_restore, own, module, None, None)
                continue
            after = own
            widen: Callable[..., Any] = partial(_widen, own, name, read, form if _has_products(module) else "none")
            if module is embedding or (type(module) is type(embedding) and type(module) is not nn.Embedding):
                widen = partial(_look_up, own["weight"], read)
                if own["weight"].device.type == "meta":  # models may look at this device to place ids or embeddings
                    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
                    hooks.callback(_restore, own, module, None, None)
                    after = {"weight": module.weight}
                if isinstance(module, nn.Embedding):  # this only matters for gradients
                    hooks.callback(setattr, module, "padding_idx", module.padding_idx)
                    module.padding_idx = None
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            hooks.callback(module.register_forward_hook(partial(_restore, after), always_call=True).remove)
        yield


def _has_products(module: nn.Module) -> bool:
    """Return whether a module's weights are quantized: linear layers and experts, but not routers."""
    name = type(module).__name__
    return name in ("Conv1D", "FalconLinear") or name.endswith("Experts")


def _product(
    linear: nn.Linear,
    own: dict[str, nn.Parameter],
    name: str,
    read: Read,
    narrow: Callable[[np.ndarray], np.ndarray],
    together: int,
    x: torch.Tensor,
) -> torch.Tensor:
    """Compute a linear layer, some rows of its weight at a time, a multiple of those that are narrowed together."""
    step = max(_AT_A_TIME // (linear.in_features * together), 1) * together
    weight, given = own["weight"], own.get("bias")
    # Allocated first: small results between large weights that are freed would fragment memory.
    made = x.new_empty(*x.shape[:-1], linear.out_features)
    for first in range(0, linear.out_features, step):
        rows = slice(first, first + step)
        bias = None if given is None else tensor(floats(whole(read(given, rows))))
        made[..., rows] = F.linear(x, tensor(_narrowed(whole(read(weight, rows)), f"{name}.weight", narrow)), bias)
    return made


def _look_up(table: nn.Parameter, read: Read, module: nn.Module, args: Any) -> tuple[torch.Tensor]:
    """Load the rows that an embedding needs; return their indices in the table that it then has."""
    ids, places = args[0].unique(return_inverse=True)
    rows = [whole(read(table, slice(i, i + 1))) for i in ids.tolist()]
    module.weight = nn.Parameter(tensor(floats(np.concatenate(rows))), requires_grad=False)
    return (places,)


def _widen(own: dict[str, nn.Parameter], of: str, read: Read, form: Form, module: nn.Module, args: Any) -> None:
    for name, parameter in own.items():
        data = taken(module, read(parameter))
        if data.ndim > 1 and not name.endswith("bias"):
            other = turned(module)
            given = array(data.transpose(-1, -2) if other else data)
            made = tensor(_narrowed(given, f"{of}.{name}", partial(narrowed, form=form)))
            data = made.transpose(-1, -2) if other else made
        _set(module, name, nn.Parameter(data.float(), requires_grad=False))


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module computes with, by name: its own, and some of modules in it.

    These are of convolutions and of a Mamba's steps, which it never calls, and of a norm to whose number format it
    rounds the norm's input.
    """
    found = dict(module.named_parameters(recurse=False))
    for inner, one in module.named_children():
        if (
            type(one) is nn.Conv1d
            or inner == "dt_proj"
            or (inner == _ROUNDING.get(type(module).__name__) and type(one) is not nn.Linear)
        ):
            found |= {f"{inner}.{name}": parameter for name, parameter in one.named_parameters()}
    return found


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, name = name.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)


def _narrowed(weight: np.ndarray, name: str, narrow: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Narrow a weight, with its name in errors."""
    try:
        return narrow(weight)
    except EngineError as error:
        raise EngineError(f"{name}: {error}") from None


def _restore(own: dict[str, nn.Parameter], module: nn.Module, args: Any, output: Any) -> None:
    for name, parameter in own.items():
        _set(module, name, parameter)
