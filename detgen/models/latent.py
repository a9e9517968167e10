"""Latent attention (DeepSeek-AI, arXiv 2405.04434): keys and values of all heads are computed from one short vector.

Its modules become two linear layers with a norm between them, for queries and for keys and values, after which it runs
like any other attention. Keys and values are stored as heads read them, not compressed. The rotated entries come first
in a head here, and last in transformers; this changes only the order in which a score is summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.quantizing import MADE, Form, narrowed
from detgen.models.parts import Latent, Linear, Through, UnknownError, some_rows
from detgen.models.stored import Weight, whole

if TYPE_CHECKING:
    from torch import nn

    from detgen.models.description import Description


def latent_of(of: Description, attention: Any) -> Latent:
    """Describe a module of latent attention.

    Raises:
        UnknownError: if it is not like DeepSeek's.
    """

    def through(down: Any, between: Any, up: Linear) -> Through:
        found = of.norm(between)
        if found is None or up.bias is not None:
            raise UnknownError("short vectors without a norm, or a bias behind them")
        return Through(of.linear(down), found, up)

    heads = int(attention.num_heads)
    turned, plain = int(attention.qk_rope_head_dim), int(attention.qk_nope_head_dim)
    order = np.roll(np.arange(heads * (turned + plain)).reshape(heads, -1), turned, 1).ravel()
    queries: Linear | Through
    if attention.q_proj is not None:
        queries = some_rows(of.linear(attention.q_proj), order)
    else:
        up = some_rows(of.linear(attention.q_b_proj), order)
        queries = through(attention.q_a_proj, attention.q_a_layernorm, up)
    up = of.linear(attention.kv_b_proj)
    return Latent(queries, through(attention.kv_a_proj_with_mqa, attention.kv_a_layernorm, up))


def expanded(weight: Weight, form: Form, *, heads: int, turned: int, values: int) -> np.ndarray:
    """Return the weight that makes all keys, whose rotated part is copied, followed by all values.

    Args:
        weight: [heads * (unrotated key entries + values), entries of the short vector].
        form: the form of linear layers; if quantized, the result holds the dequantized numbers in float32.
        heads: number of key heads.
        turned: entries of a key that are rotated.
        values: entries of a value.
    """
    numbers = narrowed(whole(weight), form) if form in MADE else whole(weight)
    of_keys, of_values = np.split(numbers.reshape(heads, -1, numbers.shape[1]), [-values], 1)
    size, short = turned + of_keys.shape[1], numbers.shape[1]
    made = np.zeros((heads * (size + values), short + turned), numbers.dtype)
    keys = made[: heads * size].reshape(heads, size, -1)
    keys[:, turned:, :short] = of_keys
    keys[:, :turned, short:] = np.eye(turned, dtype=np.float32).astype(made.dtype)
    made[heads * size :, :short] = of_values.reshape(-1, short)
    return made


def expanded_sizes(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many numbers `expanded` makes of each weight that it takes; empty for other attention."""
    found: dict[nn.Parameter, int] = {}
    module: Any  # of transformers
    for module in model.modules():
        if (up := getattr(module, "kv_b_proj", None)) is not None and hasattr(module, "qk_nope_head_dim"):
            of_head = module.qk_nope_head_dim + module.v_head_dim
            heads, turned = up.weight.shape[0] // of_head, module.qk_rope_head_dim
            found[up.weight] = heads * (of_head + turned) * (up.weight.shape[1] + turned)
    return found
