"""The declaration of the sampling parameters."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from detgen.errors import RequestError
from detgen.params import PARAMETERS, SamplingParams


def test_others_are_checked_as_the_first_were() -> None:
    params = SamplingParams(max_tokens=200, seed=3)
    assert params.with_(min_tokens=150, stop="x") == SamplingParams(max_tokens=200, min_tokens=150, seed=3, stop=("x",))
    assert list(dict(params.with_(seed=4))) == list(PARAMETERS)  # in whose order digests are taken
    assert params.with_() == params
    for changes, reason in (
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"min_tokens": 201}, r"min_tokens must be at most max_tokens \(200\), got 201"),
    ):
        with pytest.raises(RequestError, match=reason):
            params.with_(**changes)
    with pytest.raises(RequestError, match="min_tokens must be at most"):
        params.with_(min_tokens=150).with_(max_tokens=100)
    with pytest.raises(TypeError, match="'max_token'"):
        params.with_(max_token=3)


def test_they_are_values() -> None:
    params = SamplingParams(temperature=1, logit_bias={"7": 1})  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=1.0, logit_bias=((7, 1.0),))
    assert repr(params) == "SamplingParams(temperature=1.0, logit_bias=((7, 1.0),))"
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(temperature=1, logit_bias=((7, 1),))}) == 1
    with pytest.raises(ValueError, match="frozen"):
        params.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("value", ["x\ud800", [{}], float("nan"), -(10**30), 10**30], ids=ascii)
def test_no_value_is_taken_for_another(name: str, value: Any) -> None:
    """What none may be is refused by a line that names the parameter."""
    with pytest.raises(RequestError, match=rf"^{name} [^\n]+$"):
        SamplingParams(**{name: value})
