"""A model that computes something else than its own forward is refused when it is loaded, whatever of it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.own_forward import KINDS, decoders

from detgen import Engine, EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.generic.generic_decoder import GenericDecoder

Wrong = Callable[[np.ndarray], np.ndarray]
WRONG: dict[str, Wrong] = {
    "a factor": lambda logits: logits * 1.01,
    "one entry": lambda logits: np.where(np.arange(logits.shape[1]) == 7, logits.max() * np.float32(1.2), logits),
    "not a number": lambda logits: logits * np.nan,
    "rows in another order": lambda logits: np.ascontiguousarray(logits[::-1]),
}


def load(kind: str, change: Wrong) -> None:
    """Load the embedded model, whose passes give something else."""
    decoder: Any = CDecoder if kind == "c" else GenericDecoder
    run = decoder.run
    with pytest.MonkeyPatch.context() as patch, decoders(kind):
        patch.setattr("detgen.runner.census.take_census", lambda *_: Sound)
        patch.setattr(decoder, "run", lambda *args, **named: change(run(*args, **named)))
        Engine(drafter="none", kv_memory=16 << 20)


class Sound:
    """What a census finds where nothing is wrong."""

    refused = ""
    proved = ()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_logits_are_refused(kind: str, wrong: str) -> None:
    with pytest.raises(
        EngineError, match=r"LlamaForCausalLM is not supported: packed rows give other logits"
    ) as caught:
        load(kind, WRONG[wrong])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_allowed(kind: str) -> None:
    load(kind, lambda logits: logits * (1 + 1e-6))
