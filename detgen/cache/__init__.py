"""The stores that `--cache` names: where they are, what they hold, and making them smaller."""

from __future__ import annotations

from detgen.cache.cache_folder import make_store, open_store

__all__ = ["make_store", "open_store"]
