"""The modules of a model without their weights, as plain data: names, numbers and shapes.

Modules rebuilt from it look like the model to code that describes it, without transformers and torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.program.operands import name_of

if TYPE_CHECKING:
    from torch import nn

_LARGEST = 1 << 16  # entries of a buffer to keep: frequencies, not masks
# Settings of a model's origin, which say nothing about the model.
_ORIGIN = ("name_or_path", "_name_or_path", "transformers_version")
_UNREAD = "_keys_to_ignore_on_load_unexpected"  # patterns of names, of a transformers model


class Parameter:
    """A parameter without numbers.

    Attributes:
        shape: its sizes.
        dtype: its number format.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of entries it would have."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an entry."""
        return self.dtype.itemsize


class Module:
    """A module that computes nothing; its methods have torch's names."""

    def __init__(self) -> None:
        self.__dict__["_parts"] = {}, {}, {}  # modules, parameters, buffers

    def put(self, kind: int, name: str, value: Any) -> None:
        """Add a module (0), a parameter (1) or a buffer (2)."""
        self._parts[kind][name] = value

    def __getattr__(self, name: str) -> Any:
        for parts in self.__dict__.get("_parts", ()):
            if name in parts:
                return parts[name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield direct submodules, by name."""
        yield from ((name, part) for name, part in self._parts[0].items() if part is not None)

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield the module itself and all modules in it, each once, by their paths."""
        seen: set[int] = set()

        def below(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                for name, part in module.named_children():
                    yield from below(f"{path}.{name}" if path else name, part)

        yield from below("", self)

    def modules(self) -> Iterator[Module]:
        """Yield the same without paths."""
        yield from (module for _, module in self.named_modules())

    def _named(self, kind: int, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules() if recurse else [("", self)]:
            for name, part in module._parts[kind].items():
                if part is not None and id(part) not in seen:
                    seen.add(id(part))
                    yield f"{path}.{name}" if path else name, part

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield its parameters, and those of the modules in it, each once, by name."""
        yield from self._named(1, recurse)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the same without names."""
        yield from (part for _, part in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield its buffers: numbers that are not parameters."""
        yield from self._named(2, recurse=True)

    def state_dict(self) -> dict[str, Parameter]:
        """Return its parameters by their names in files."""
        return dict(self.named_parameters())


class _Modules(Module):
    """A list of modules."""

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> Module:
        found: Module = self._parts[0][str(range(len(self))[index])]
        return found

    def __iter__(self) -> Iterator[Module]:
        yield from self._parts[0].values()


def is_torch(module: Any, name: str) -> bool:
    """Return whether a module, torch's or a skeleton's, is of torch's own class of that name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("torch.nn.")


def is_parameter(value: Any) -> bool:
    """Return whether an attribute of a module is a parameter, not a buffer."""
    return type(value).__name__ == "Parameter"


class Settings:
    """Values of a configuration, as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> Settings:
        """Return itself: models with configurations of their parts have no skeletons."""
        return self


def skeleton_of(model: Any) -> dict[str, Any] | None:
    """Return a transformers model as data that JSON can hold; None if its configuration has parts.

    Args:
        model: the model; its parameters may be on `meta`.
    """
    if model.config.get_text_config() is not model.config:
        return None
    parameters: dict[nn.Parameter, int] = {}
    configs: dict[int, Any] = {}  # by identity
    modules = _taken(model, parameters, configs)
    return {
        "modules": modules,
        "unread": list(getattr(model, _UNREAD, None) or ()),
        "parameters": [[list(p.shape), name_of(p.dtype)] for p in parameters],
        "configs": [_values(config) for config in configs.values()],
        "config": list(configs).index(id(model.config)),
    }


def _taken(module: nn.Module, parameters: dict[nn.Parameter, int], configs: dict[int, Any]) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    taken: dict[str, Any] = {"class": type(module).__name__, "torch": type(module).__module__.startswith("torch.nn.")}
    if hasattr(config := own.pop("config", None), "to_dict"):
        configs.setdefault(id(config), config)
        taken["config"] = list(configs).index(id(config))
    taken["settings"] = {name: value for name, value in own.items() if _is_plain(value) and name not in _ORIGIN}
    taken["buffers"] = {
        name: buffer.tolist()
        for name, buffer in module.named_buffers(recurse=False)
        if (buffer.dtype.is_floating_point or not buffer.ndim) and buffer.ndim <= 1 and buffer.numel() <= _LARGEST
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
        with suppress(RuntimeError):  # if layers have numbers of their own
            values[name] = getattr(config, name, None)
    return {name: value for name, value in values.items() if _is_plain(value) and name not in _ORIGIN}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def model_of(skeleton: dict[str, Any]) -> Any:
    """Rebuild the modules of a skeleton."""
    parameters = [Parameter(tuple(shape), np.dtype(dtype)) for shape, dtype in skeleton["parameters"]]
    configs = [Settings(values) for values in skeleton["configs"]]
    model: Any = _made(skeleton["modules"], parameters, configs)
    model.config = configs[skeleton["config"]]
    setattr(model, _UNREAD, skeleton["unread"])
    return model


def _made(taken: dict[str, Any], parameters: list[Parameter], configs: list[Settings]) -> Any:
    module: Any = _class(taken["class"], torch=taken["torch"])()
    if "config" in taken:
        module.config = configs[taken["config"]]
    for name, value in taken["settings"].items():
        setattr(module, name, value)
    for name, numbers in taken["buffers"].items():
        module.put(2, name, np.array(numbers, np.float32))
    for name, index in taken["parameters"].items():
        module.put(1, name, None if index is None else parameters[index])
    for name, inner in taken["modules"].items():
        module.put(0, name, None if inner is None else _made(inner, parameters, configs))
    return module


@cache
def _class(name: str, *, torch: bool) -> type[Module]:
    """Make a class of modules with that name; only the name matters."""
    base = _Modules if name == "ModuleList" else Module
    return type(name, (base,), {"__module__": "torch.nn.modules" if torch else __name__})
