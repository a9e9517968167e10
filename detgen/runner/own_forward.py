"""Runs a model's own forward in transformers for facts that packed passes need and are compared with."""

from __future__ import annotations

from transformers import PreTrainedModel

from detgen.models.attaching import attach
from detgen.models.explained import explained
from detgen.models.loaded import LoadedModel
from detgen.models.own_forward import OwnForward
from detgen.runner.comparing import check_numbers
from detgen.runner.deep_forward import depth_of
from detgen.runner.reference import reference_logits


def ask(loaded: LoadedModel, model: PreTrainedModel, *, compared: bool) -> OwnForward:
    """Run a model's own forward, and replace its attention by detgen's; call it before replacing any module.

    Args:
        loaded: a loaded model.
        model: its decoder.
        compared: whether packed passes will be compared with it.

    Raises:
        EngineError: if it is not supported, or its logits are not finite because a weight is not.
    """
    # Some settings only prove impossible in a model's first pass.
    with explained(loaded.name):
        reference = reference_logits(model, loaded.vocabulary, loaded.form, loaded.read) if compared else None
        if reference is not None:
            check_numbers(reference, loaded, model)
        layout = attach(model, loaded.name)
        return OwnForward(layout, reference, depth_of(loaded, model, layout) if compared else None)
