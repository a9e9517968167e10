from __future__ import annotations

from collections.abc import Callable

MODELS: dict[str, type] = {}


def register_model(name: str) -> Callable[[type], type]:
    def register(model: type) -> type:
        MODELS[name] = model
        return model

    return register
