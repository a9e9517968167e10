"""The generation loop: requests, scheduler, decoding, verification, stopping. Knows no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from detgen.interruption import interrupted_later

if TYPE_CHECKING:
    from detgen.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Lazily, since the package's plain data is also used without an engine.
    if name == "Engine":
        with interrupted_later():
            from detgen.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
