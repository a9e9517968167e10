"""A model that computes something else than its own forward is refused when it is loaded, whatever of it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.own_forward import KINDS, decoders

from detgen import Engine, EngineError
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.generic.generic_decoder import GenericDecoder

Wrong = Callable[[torch.Tensor], torch.Tensor]
WRONG: dict[str, Wrong] = {
    "a factor": lambda logits: logits * 1.01,
    "one entry": lambda logits: logits.index_fill(1, torch.tensor([7]), float(logits.max()) * 1.2),
    "not a number": lambda logits: logits * torch.nan,
    "rows in another order": lambda logits: logits.flip(0),
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
