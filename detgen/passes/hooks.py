"""Seeing what the modules of a model compute, by the names that the model has for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Is told name, module, arguments and output of a module.
Take = Callable[[str, nn.Module, tuple[Any, ...], object], None]


@contextmanager
def hooked(model: nn.Module, take: Take) -> Iterator[None]:
    """Tell of each module inside `model`, whenever it has computed something.

    Their forwards are replaced meanwhile; torch's own hooks are passed by where a forward is called as such.
    """
    modules = [(name, module) for name, module in model.named_modules() if name]
    for name, module in modules:
        module.forward = _telling(name, module, module.forward, take)
    try:
        yield
    finally:
        for _, module in modules:
            del module.forward


def _telling(name: str, module: nn.Module, forward: Callable[..., Any], take: Take) -> Callable[..., Any]:
    @functools.wraps(forward)
    def telling(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)
        take(name, module, args, output)
        return output

    return telling
