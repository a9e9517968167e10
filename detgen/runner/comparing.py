"""Compares a model's packed passes with its own forward, or with what they gave when they were compared with it.

Where linear layers round what they read, a comparison with a forward in floating point takes passes that do not, which
widen all weights. Of a model that is kept, it is enough that its passes give the very bits that they gave in the run
that compared them: they are the same on any processor.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from detgen.models.own_forward import OwnForward
from detgen.program.arrays import array, floats
from detgen.runner.depth import check_depth, deep_rows
from detgen.runner.model_runner import ModelRunner
from detgen.runner.reference import check_reference, first_rows


def compared(runner: ModelRunner, own: OwnForward, vocabulary: int) -> OwnForward:
    """Compare packed passes with the model's own forward; clears the cache.

    Args:
        runner: the model's passes, over a cache in float32.
        own: what its own forward has told, of a target.
        vocabulary: token ids that it reads.

    Returns:
        The same, with the digest of the passes' bits.

    Raises:
        EngineError: if packed passes do not compute what the model's own forward does.
    """
    assert own.reference is not None, "the target is compared"
    found = _digest(runner, own, vocabulary)
    if found != own.agreed:
        check_reference(runner, own.reference, vocabulary)
        if own.depth is not None:
            check_depth(runner, own.depth)
    return replace(own, agreed=found)


def _digest(runner: ModelRunner, own: OwnForward, vocabulary: int) -> str:
    """SHA-256 of the logits of the forward, and of packed passes as they run."""
    found = [own.reference, first_rows(runner, vocabulary)]
    if own.depth is not None:
        found += [own.depth.logits, deep_rows(runner, own.depth)]
    digest = hashlib.sha256()
    for logits in found:
        assert logits is not None
        digest.update(floats(array(logits)).tobytes())
    return digest.hexdigest()
