"""Completions that are kept for later runs, in a SQLite database, by the digest of profile and request.

A completion is a pure function of the two, so what is found is what would be generated. Knows completions and bytes;
knows no engine, and no run.
"""

from __future__ import annotations

from detgen.cache.cache_folder import make_store, open_store
from detgen.cache.completions import CompletionCache
from detgen.cache.former import drop_written, keep_former
from detgen.cache.store import Store, profile_digest

__all__ = [
    "CompletionCache",
    "Store",
    "drop_written",
    "keep_former",
    "make_store",
    "open_store",
    "profile_digest",
]
