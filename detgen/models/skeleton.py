"""The modules of a model without their weights, as plain data: names, numbers and shapes.

Modules made of it again read like the model to whoever describes it, without transformers. They compute nothing.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

_LARGEST = 1 << 16  # entries of a buffer that is taken along: frequencies, not masks
_UNREAD = "_keys_to_ignore_on_load_unexpected"  # patterns of names, of a transformers model


class Settings:
    """A configuration's values, as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> Settings:
        """Itself: models with configurations of their parts are not taken apart."""
        return self


def skeleton_of(model: Any) -> dict[str, Any] | None:
    """A transformers model as data that JSON can hold; None if it has a configuration of parts.

    Args:
        model: its parameters may be on `meta`.
    """
    if model.config.get_text_config() is not model.config:
        return None
    parameters: dict[nn.Parameter, int] = {}
    configs: dict[int, Any] = {}  # by their identity
    modules = _taken(model, parameters, configs)
    return {
        "modules": modules,
        "unread": list(getattr(model, _UNREAD, None) or ()),
        "parameters": [[list(p.shape), str(p.dtype).removeprefix("torch.")] for p in parameters],
        "configs": [_values(config) for config in configs.values()],
        "config": list(configs).index(id(model.config)),
    }


def _taken(module: nn.Module, parameters: dict[nn.Parameter, int], configs: dict[int, Any]) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    taken: dict[str, Any] = {"class": type(module).__name__, "torch": type(module).__module__.startswith("torch.nn.")}
    if hasattr(config := own.pop("config", None), "to_dict"):
        configs.setdefault(id(config), config)
        taken["config"] = list(configs).index(id(config))
    taken["settings"] = {name: value for name, value in own.items() if _is_plain(value)}
    taken["buffers"] = {
        name: buffer.tolist()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype.is_floating_point and buffer.ndim <= 1 and buffer.numel() <= _LARGEST
    }
    taken["parameters"] = {
        name: None if parameter is None else parameters.setdefault(parameter, len(parameters))
        for name, parameter in module._parameters.items()
    }
    taken["modules"] = {
        name: None if inner is None else _taken(inner, parameters, configs) for name, inner in module._modules.items()
    }
    return taken


def _values(config: Any) -> dict[str, Any]:
    values = {}
    for name in sorted({*config.to_dict(), *getattr(config, "attribute_map", ())}):
        with suppress(RuntimeError):  # where layers have numbers of their own
            values[name] = getattr(config, name, None)
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def model_of(skeleton: dict[str, Any]) -> Any:
    """The modules of a skeleton, in evaluation mode, with parameters on `meta`."""
    parameters = [
        nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), requires_grad=False)
        for shape, dtype in skeleton["parameters"]
    ]
    configs = [Settings(values) for values in skeleton["configs"]]
    model: Any = _made(skeleton["modules"], parameters, configs)
    model.config = configs[skeleton["config"]]
    setattr(model, _UNREAD, skeleton["unread"])
    return model


def _made(taken: dict[str, Any], parameters: list[nn.Parameter], configs: list[Settings]) -> nn.Module:
    kind = getattr(nn, taken["class"]) if taken["torch"] else _class(taken["class"])
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    if "config" in taken:
        module.config = configs[taken["config"]]
    for name, value in taken["settings"].items():
        setattr(module, name, value)
    for name, numbers in taken["buffers"].items():
        module.register_buffer(name, torch.tensor(numbers), persistent=False)
    for name, index in taken["parameters"].items():
        module.register_parameter(name, None if index is None else parameters[index])
    for name, inner in taken["modules"].items():
        module.add_module(name, None if inner is None else _made(inner, parameters, configs))
    return module


@cache
def _class(name: str) -> type[nn.Module]:
    """A class of modules by that name, which is all that is asked of it."""
    return type(name, (nn.Module,), {})
