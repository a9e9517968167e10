"""Compares packed rows with the model's own forward, to check that the right model runs.

Rows cannot depend on each other, by construction, but a model may be interpreted wrongly. So a few tokens go through
its own eager forward, before anything in it is replaced, and through a packed pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from detgen.errors import EngineError
from detgen.kernels.c.quantizing import Form
from detgen.kernels.input_batch import Window
from detgen.models.stored import Read, held
from detgen.program.arrays import Array, array
from detgen.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 24
_EXACT = 1e-3  # largest allowed difference, relative to the largest logit


def _tokens(vocabulary: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(20).integers(0, vocabulary, _TOKENS).tolist()
    return tokens


def reference_logits(model: PreTrainedModel, vocabulary: int, form: Form = "none", read: Read = held) -> np.ndarray:
    """Return logits of a few tokens by the model's own eager forward; call it before replacing any module.

    Args:
        model: the model as loaded.
        vocabulary: number of token ids that it reads.
        form: see `LoadedModel`.
        read: see `LoadedModel`.

    Returns:
        float32 [tokens, vocabulary]; hidden states if the model has no output layer.
    """
    import torch

    from detgen.models.attaching import experts_by
    from detgen.models.widened_forward import widened

    device = "cpu" if model.device.type == "meta" else model.device
    ids = torch.tensor([_tokens(vocabulary)], device=device)
    model.set_attn_implementation("eager")
    with torch.inference_mode(), widened(model, read, form), experts_by(model, "eager"):
        return array(model(input_ids=ids, use_cache=False).logits[0].float())


def check_reference(runner: ModelRunner, reference: np.ndarray, vocabulary: int) -> None:
    """Compare a packed pass with the model's own forward; clears the cache.

    Args:
        runner: the model's passes.
        reference: the result of `reference_logits`.
        vocabulary: number of token ids that the model reads.

    Raises:
        EngineError: if packed passes do not compute what the model's own forward does.
    """
    with runner.decoder.exactly():
        packed = first_rows(runner, vocabulary)
    check_logits(runner, packed, reference)


def first_rows(runner: ModelRunner, vocabulary: int) -> Array:
    """Return logits of the same tokens by a packed pass, float32 [tokens, vocabulary]; clears the cache."""
    runner.cache.pages.lay_out(1, _TOKENS)
    return runner.run([Window(0, 0, _tokens(vocabulary), _TOKENS)])


def check_logits(runner: ModelRunner, packed: Array, reference: np.ndarray, where: str = "") -> None:
    """Compare packed logits with the model's own.

    Args:
        runner: the passes that gave them.
        packed: float32 [rows, vocabulary].
        reference: float32 [rows, vocabulary], by the model's own forward.
        where: place of the rows, for the message.

    Raises:
        EngineError: if the difference is larger than rounding explains.
    """
    with np.errstate(invalid="ignore"):  # for infinite logits
        error = float(np.abs(reference - array(packed)).max() / max(np.abs(reference).max(), 1e-6))
    if error <= _EXACT:
        return
    decoder = runner.decoder
    why = decoder.explain_difference() or (
        f"packed rows{where} give other logits than the model's own forward "
        f"(largest difference {error:.1e} of the largest logit)"
    )
    raise EngineError(f"{decoder.kind} is not supported: {why}")
