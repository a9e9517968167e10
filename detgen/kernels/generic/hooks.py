"""Observing what a model computes, module by module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Called with the name, module, arguments and output of a module.
Take = Callable[[str, nn.Module, tuple[Any, ...], object], None]


@contextmanager
def hooked(model: nn.Module, take: Take) -> Iterator[None]:
    """Call `take` after each call of a module inside `model`.

    Replaces the modules' `forward` meanwhile, since torch's own hooks miss a `forward` that is called directly.
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
