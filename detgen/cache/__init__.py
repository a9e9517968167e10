"""The stores that `--cache` names: where they are, what they hold, and making them smaller."""

from __future__ import annotations

from detgen.cache.cache_folder import open_store, store_of_run

__all__ = ["open_store", "store_of_run"]
