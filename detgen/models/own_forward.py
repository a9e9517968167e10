"""The facts recorded from a model's own forward in transformers. Plain data, without transformers or a back end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.decoder import StateShape


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of a model keep of sequences, as recorded in a forward pass.

    Attributes:
        cached: (kv_heads, key head size, value head size) of each layer; zeros for a layer without attention, and for
            the values of latent attention, which are entries of keys.
        traits: attention traits of each layer; None for a layer without attention.
        group: query heads per KV head.
        uncalled: names of modules that their parents use without calling them.
        states: what each layer keeps besides, or instead of, keys and values; empty if no layer keeps states.
    """

    cached: list[tuple[int, int, int]]
    traits: list[AttentionTraits | None]
    group: int
    uncalled: frozenset[str] = frozenset()
    states: tuple[StateShape | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Depth:
    """The results of a model's own forward deep in a sequence.

    Attributes:
        at: position of the first token.
        tokens: token ids of the rows, preceded, if nothing is made up, by all earlier tokens.
        pages: the made-up page at each whole block of earlier positions, then the partial one; empty if nothing is made
            up.
        logits: float32 [rows, vocabulary], of the last tokens.
    """

    at: int
    tokens: list[int]
    pages: list[int]
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class OwnForward:
    """All facts.

    Attributes:
        layout: of the model's layers.
        reference: logits of a few tokens, float32 [tokens, vocabulary]; None for a draft model, which need not be
            right, and before they are computed.
        depth: results deep in a sequence; None without a reference, or if they are impossible to get.
        agreed: SHA-256 of these logits, and of those of the packed passes compared with them; None before.
    """

    layout: Layout
    reference: np.ndarray | None = None
    depth: Depth | None = None
    agreed: str | None = None
