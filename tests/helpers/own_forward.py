"""Runs models that a description fits by transformers' own forward all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from detgen.models import loaded, loading
from detgen.runner import preparing

KINDS = ("c", "generic")  # decoders that the same model can have


@contextmanager
def decoders(kind: str) -> Iterator[None]:
    """Inside, models that could have both kinds of decoders get this one."""
    assert kind in KINDS
    with pytest.MonkeyPatch.context() as patch:
        if kind == "generic":
            for module in (loaded, loading, preparing):
                patch.setattr(module, "has_description", lambda _: False)
        yield
