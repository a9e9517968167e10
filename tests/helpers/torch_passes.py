"""Passes by torch's operators, as where no C compiler was found when detgen was installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from detgen.passes import loading, preparing

KINDS = ("native", "lean", "plain")  # decoders that the same model can have


@contextmanager
def decoders(kind: str) -> Iterator[None]:
    """Inside, models that could have several kinds of decoders get this one."""
    with pytest.MonkeyPatch.context() as patch:
        if kind != "native":
            for module in (loading, preparing):
                patch.setattr(module, "is_native", lambda _: False)
                patch.setattr(module, "runs_natively", lambda _: False)
        if kind == "plain":
            patch.setattr(preparing, "lean_decoder", lambda *_: None)
        yield
