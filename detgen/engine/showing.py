"""Short representations of data, for interpreters and logs."""

from __future__ import annotations

import reprlib
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from detgen.params import SamplingParams

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 2


def brief(instance: Any) -> str:
    """Return a dataclass with its non-default fields, long values shortened."""
    return call(
        type(instance).__name__,
        {f.name: v for f in fields(instance) if (v := getattr(instance, f.name)) != _default(f)},
    )


def call(name: str, arguments: dict[str, Any]) -> str:
    """Return `name(argument=value, ...)`, long values shortened."""
    return f"{name}({', '.join(f'{key}={_shown(value)}' for key, value in arguments.items())})"


def _shown(value: Any) -> str:
    if isinstance(value, SamplingParams):
        return call("SamplingParams", dict(value.__repr_args__()))
    return brief(value) if is_dataclass(value) and not isinstance(value, type) else _SHORT.repr(value)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
