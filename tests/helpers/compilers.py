"""Running the same with and without the compiled choosing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from detgen.kernels import choosing


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it, choosing is what it is where nothing was compiled."""
    with mock.patch.object(choosing, "_library", return_value=None):
        yield


def both_ways() -> Iterator[bool]:
    """Once with what was compiled, if there is any, and once without; yields whether it is with."""
    if choosing._library() is not None:
        yield True
    with without_compiler():
        yield False
