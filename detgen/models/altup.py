"""What Gemma 3n has beside the parts of others: streams of hidden states, low-rank layers, gates of which few stay."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.models.parts import AltUp, Laurel, Streams, UnknownError
from detgen.program.arrays import floats

if TYPE_CHECKING:
    from detgen.models.description import Description

_LEAST = 1e-5  # which is no setting


def streams_of(of: Description) -> Streams | None:
    """The streams of hidden states; None if there are none side by side.

    Raises:
        UnknownError: if there is one.
    """
    inner = of.inner
    if not hasattr(inner, "altup_projections"):
        return None
    begin, end = [
        [of.linear(each) for each in part] for part in (inner.altup_projections, inner.altup_unembed_projections)
    ]
    if not begin:
        raise UnknownError("a single stream")
    return Streams(begin, end, _LEAST)


def altup_of(of: Description, layer: Any) -> AltUp | None:
    """How a layer reads and changes its stream; None where there are no streams."""
    altup, config = getattr(layer, "altup", None), of.config
    if altup is None:
        return None
    correct, scales = of.linear(altup.correction_coefs), floats(of.array(altup.correct_output_scale))
    return AltUp(
        active=int(config.altup_active_idx) % int(config.altup_num_inputs),
        norm=of.given_norm(altup.router_norm),
        factor=float(altup.router_input_scale),
        router=of.linear(altup.modality_router),
        predict=of.linear(altup.prediction_coefs),
        correct=correct._replace(bias=np.ones(correct.weight.shape[0], np.float32)),
        scales=scales if config.altup_correct_scale else None,
    )


def laurel_of(of: Description, layer: Any) -> Laurel | None:
    """What stands beside a layer's attention; None for nothing."""
    laurel = getattr(layer, "laurel", None)
    if laurel is None:
        return None
    left, right = of.linear(laurel.linear_left), of.linear(laurel.linear_right)
    return Laurel(left, right, of.given_norm(laurel.post_laurel_norm))


def deviations_of(mlp: Any) -> float | None:
    """By how many standard deviations gates that stay exceed the mean; None if all stay.

    Raises:
        UnknownError: if none stays.
    """
    share = np.float32(getattr(mlp, "activation_sparsity", 0.0))
    if share <= 0:
        return None
    if share >= 1:
        raise UnknownError("gates of which none stays")
    return NormalDist().inv_cdf(float(share))
