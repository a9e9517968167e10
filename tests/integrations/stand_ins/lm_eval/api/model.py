from __future__ import annotations

from typing import Any


class Hook:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, Any]] = []

    def add_partial(self, kind: str, asked: Any, result: Any) -> None:
        self.told.append((kind, asked, result))


class TemplateLM:
    def __init__(self) -> None:
        self.cache_hook = Hook()

    @classmethod
    def create_from_arg_obj(cls, named: dict[str, Any], more: dict[str, Any]) -> Any:
        return cls(**named, **{name: value for name, value in more.items() if value is not None})
