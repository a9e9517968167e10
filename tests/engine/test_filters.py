"""Filters that a back end lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from detgen import Engine, Request, SamplingParams
from detgen.kernels import choosing


def test_a_filter_that_the_back_end_lacks_is_an_error(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if min_p were new: its request does not run without it, and the others run."""
    monkeypatch.setattr(choosing, "KNOWN", choosing.KNOWN - {"min_p"})
    params = [SamplingParams(max_tokens=2, temperature=1, min_p=p) for p in (0.0, 0.1)]
    plain, asked = engines(drafter="none").generate([Request(prompt="a", params=each) for each in params])
    assert (plain.error, len(plain.token_ids)) == (None, 2)
    assert asked.error == "min_p is not supported on cpu; leave it out, or give 0"
