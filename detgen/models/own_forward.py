"""What a model's own forward in transformers has told of it. Plain data: knows neither transformers nor a back end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.decoder import StateShape


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of a model keep of sequences, as recorded in a forward pass.

    Attributes:
        cached: (kv_heads, key head size, value head size) of each layer; zeros of one that has no attention.
        traits: attention traits of each layer; None of one that has none.
        group: query heads per KV head.
        uncalled: names of modules that the modules they are in use without calling them.
        states: what each layer keeps beside keys and values, or instead of them; empty if none does.
    """

    cached: list[tuple[int, int, int]]
    traits: list[AttentionTraits | None]
    group: int
    uncalled: frozenset[str] = frozenset()
    states: tuple[StateShape | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Depth:
    """What a model's own forward gives deep in a sequence.

    Attributes:
        at: position of the first token.
        tokens: of the rows, and of what is before them where nothing is made up.
        pages: the made-up page that stands at each whole block of positions before, then the one that is cut short;
            empty where nothing is made up.
        logits: float32 [rows, vocabulary], of the last tokens.
    """

    at: int
    tokens: list[int]
    pages: list[int]
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class OwnForward:
    """All of it.

    Attributes:
        layout: of its attention layers.
        reference: logits of a few tokens, float32 [tokens, vocabulary]; None of a draft model, which need not be right,
            and where it has not been asked.
        depth: those deep in a sequence; None where there is no reference, or they cannot be had.
        agreed: SHA-256 of these logits, and of those of the packed passes that were compared with them; None before.
    """

    layout: Layout
    reference: np.ndarray | None = None
    depth: Depth | None = None
    agreed: str | None = None
