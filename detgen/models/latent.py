"""Latent attention (DeepSeek-AI, arXiv 2405.04434): keys and values of all heads are computed from one short vector.

That vector is what is kept of a token, with the rotated entries that the keys of all heads share: one key, whose last
entries are the value. Instead of expanding it to keys and values, a pass takes each query to where it meets the vector,
and each result from there: `q . (K c) = (K' q) . c`, and the sum of `w (V c)` is `V` times the sum of `w c`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.kernels.c.panels import stacked
from detgen.kernels.c.quantizing import Form, Quantized, narrowed, rows_of
from detgen.models.parts import Attention, Latent, Linear, Through, UnknownError, some_rows
from detgen.models.skeleton import is_torch
from detgen.models.step_parts import Keep, NormParts, joint, kept
from detgen.models.stored import Reader, Weight, whole
from detgen.program import steps
from detgen.program.operands import PANEL, Buffer, Into
from detgen.program.operands import Weight as Packed
from detgen.program.program import Program

if TYPE_CHECKING:
    from detgen.models.description import Description


def kept_entries(attention: Any) -> int:
    """Return how many entries a module of latent attention keeps of a token."""
    return int(attention.kv_lora_rank) + int(attention.qk_rope_head_dim)


def latent_of(of: Description, attention: Any) -> Latent:
    """Describe a module of latent attention.

    Raises:
        UnknownError: if it is not like DeepSeek's.
    """
    heads, short = int(attention.num_heads), int(attention.kv_lora_rank)
    turned, plain = int(attention.qk_rope_head_dim), int(attention.qk_nope_head_dim)
    order = np.roll(np.arange(heads * (turned + plain)).reshape(heads, -1), turned, 1).ravel()
    queries: Linear | Through
    if attention.q_proj is not None:
        queries = some_rows(of.linear(attention.q_proj), order)
    else:
        up = some_rows(of.linear(attention.q_b_proj), order)
        norm = of.norm(attention.q_a_layernorm)
        if norm is None or up.bias is not None:
            raise UnknownError("short vectors without a norm, or a bias behind them")
        queries = Through(of.linear(attention.q_a_proj), norm, up)
    down = some_rows(of.linear(attention.kv_a_proj_with_mqa), np.roll(np.arange(short + turned), turned))
    norm, up = of.norm(attention.kv_a_layernorm), attention.kv_b_proj
    if norm is None or not is_torch(up, "Linear") or up.bias is not None:
        raise UnknownError("short vectors without a norm, or a bias behind them")
    keys, values = _by_head(of, up.weight, heads, plain)
    return Latent(queries, down, norm, keys, values)


def _by_head(of: Description, parameter: Any, heads: int, plain: int) -> tuple[Weight, Weight]:
    """Return the weights that take queries to short vectors, [heads, short, plain], and these to values."""
    if isinstance(of.read, Reader) and (apart := of.read.by_head(parameter)) is not None:
        of.used.add(id(parameter))
        return apart
    weight = of.weight(parameter)
    numbers = whole(weight).reshape(heads, -1, weight.shape[1])
    keys, values = numbers[:, :plain].swapaxes(1, 2), numbers[:, plain:]
    if not isinstance(weight, Quantized):
        return keys, values
    few = weight.rows(np.arange(weight.shape[0]).reshape(heads, -1)[:, plain:])
    return keys, few


def narrowed_by_head(weight: np.ndarray, form: Form, *, size: int, plain: int) -> np.ndarray:
    """Return in float32 what weights that make keys and values of short vectors become in a form; see `narrowed`.

    Args:
        weight: [heads * size, entries of the short vector].
        form: in which they take queries to short vectors, and these to values.
        size: entries of a key that are not rotated, and of a value.
        plain: entries of a key that are not rotated.
    """
    by_head = weight.reshape(-1, size, weight.shape[1])
    keys = narrowed(by_head[:, :plain].swapaxes(1, 2), form).swapaxes(1, 2)
    return np.concatenate([keys, narrowed(by_head[:, plain:], form)], axis=1).reshape(weight.shape)


class LatentSteps:
    """Builds the steps of latent attention before and behind the attention itself."""

    def __init__(self, attention: Attention, latent: Latent, form: Form, keep: Keep) -> None:
        self._heads, self._turned = attention.heads, attention.size - attention.values
        self._short: tuple[Packed, NormParts] | None = None
        queries = latent.queries
        if isinstance(queries, Through):
            self._short, queries = (joint([queries.down], form, keep), NormParts.of(queries.norm, keep)), queries.up
        self._queries, self._down = joint([queries], form, keep), joint([latent.down], form, keep)
        self._norm = NormParts.of(latent.norm, keep)
        self._keys, self._values = (_of_heads(weight, form, keep) for weight in (latent.keys, latent.values))

    def build(self, program: Program, name: str, read: Buffer, qkv: Buffer) -> None:
        """Append the steps that make queries, and the key of all heads."""
        queries, x = Buffer("queries", self._queries.outputs), read
        if self._short is not None:
            weight, norm = self._short
            x = Buffer("short q", weight.outputs)
            program.add(steps.Linear(name=f"{name}.q_a", x=read, to=Into(x), weight=weight))
            program.add(norm.step(f"{name}.q_a, normed", x, Into(x)))
        end = qkv.width - self._down.outputs
        program.add(steps.Linear(name=f"{name}.q", x=x, to=Into(queries), weight=self._queries))
        program.add(
            steps.HeadLinear(
                name=f"{name}.q, for short vectors",
                x=queries,
                to=qkv,
                heads=self._heads,
                passed=self._turned,
                weight=self._keys,
            )
        )
        program.add(steps.Linear(name=f"{name}.kv_a", x=read, to=Into(qkv), at=end, weight=self._down))
        program.add(self._norm.step(f"{name}.kv_a, normed", qkv, Into(qkv), at=end + self._turned))

    def finish(self, program: Program, name: str, attended: Buffer, *, wanted: bool) -> Buffer:
        """Append the step that makes results of weighted short vectors; return their buffer."""
        to = Buffer("values", self._heads * self._values.outputs)
        program.add(
            steps.HeadLinear(
                name=f"{name}.values", wanted=wanted, x=attended, to=to, heads=self._heads, weight=self._values
            )
        )
        return to


def _of_heads(weight: Weight, form: Form, keep: Keep) -> Packed:
    """Pack the weight of each head, from [heads, outputs, inputs]."""
    return kept(stacked([[rows_of(weight, i)] for i in range(weight.shape[0])], PANEL, form), keep)
