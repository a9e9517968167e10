"""The stores of `--cache`: where they are, what they hold, and how to make them smaller."""

from __future__ import annotations

from detgen.cache.cache_folder import open_store, store_of_run

__all__ = ["open_store", "store_of_run"]
