"""How many examples a property is tried on."""

from __future__ import annotations

import os

import hypothesis

_FACTOR = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 1


def examples(usual: int) -> hypothesis.settings:
    """That many, ten times as many in the profile `explore`."""
    return hypothesis.settings(max_examples=usual * _FACTOR)
