"""Compares a model's packed passes with its own forward, or with their results when they were compared with it.

If linear layers round their inputs, comparing with a forward in floating point takes passes that do not round and that
widen all weights. For a kept model it is enough that its passes give the same bits as in the run that compared them:
these are the same on any processor.

A model made from its file's header (`detgen/models/gguf/plain.py`) has no recorded forward; tests compare its family.
Its passes only have to give finite numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from detgen.models.explained import explained
from detgen.models.loaded import LoadedModel
from detgen.models.own_forward import OwnForward
from detgen.models.stored import damaged
from detgen.program.arrays import array, floats
from detgen.runner.depth import check_depth, deep_rows
from detgen.runner.model_runner import ModelRunner
from detgen.runner.reference import check_logits, check_reference, first_rows


def check_numbers(logits: np.ndarray, loaded: LoadedModel, model: Any) -> None:
    """Refuse a model with an infinite or NaN weight.

    Args:
        logits: logits of any rows; weights are only examined if one is not finite.
        loaded: the model.
        model: its decoder.

    Raises:
        EngineError: names the weight.
    """
    if not np.isfinite(logits).all() and (name := damaged(model, loaded.read)):
        with explained(loaded.name):
            raise ValueError(f"its tensor {name} has an entry that is infinite or not a number; fetch it again")


def compared(runner: ModelRunner, own: OwnForward, loaded: LoadedModel) -> OwnForward:
    """Compare packed passes with the model's own forward, if it was recorded; clears the cache.

    Args:
        runner: the model's passes, over a cache in float32.
        own: results of its own forward.
        loaded: the model, a target.

    Returns:
        The same, with the digest of the passes' bits.

    Raises:
        EngineError: if packed passes do not compute what the model's own forward does, or a weight is not finite.
    """
    vocabulary = loaded.vocabulary
    if own.reference is None:
        rows = array(first_rows(runner, vocabulary))
        check_numbers(rows, loaded, loaded.backbone)
        check_logits(runner, rows, rows)  # NaN differs from itself
        return own
    found = _digest(runner, own, vocabulary)
    if found != own.agreed:
        check_reference(runner, own.reference, vocabulary)
        if own.depth is not None:
            check_depth(runner, own.depth)
    return replace(own, agreed=found)


def _digest(runner: ModelRunner, own: OwnForward, vocabulary: int) -> str:
    """Return SHA-256 of the logits of the forward, and of packed passes as they run."""
    found = [own.reference, first_rows(runner, vocabulary)]
    if own.depth is not None:
        found += [own.depth.logits, deep_rows(runner, own.depth)]
    digest = hashlib.sha256()
    for logits in found:
        assert logits is not None
        digest.update(floats(array(logits)).tobytes())
    return digest.hexdigest()
