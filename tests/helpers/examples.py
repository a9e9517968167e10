"""How many examples a property is tried on."""

from __future__ import annotations

import os

import hypothesis

_FACTOR = {"thorough": 1.0, "explore": 10.0}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 0.4)


def examples(usual: int) -> hypothesis.settings:
    """That many in the profile `thorough`, which CI takes; ten times as many in `explore`, else two fifths."""
    return hypothesis.settings(max_examples=max(round(usual * _FACTOR), 1))
