"""Norms of heads, rotary embedding and the write to the cache, in one launch.

Promise: a head of a row depends on what the row's projections gave, on its position, and on nothing else; no two rows
write to one place of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from detgen.kernels.triton.launching import OPTIONS, above
from detgen.program.finite import bounded, most


@triton.jit
def _bounded(x, LIMIT: tl.constexpr):
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), 0.0)


@triton.jit
def _squares(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)


@triton.jit
def _scaled(x, scale, weights):
    """x times the scale, rounded, times the weights, rounded, as transformers does."""
    return ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * weights.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate(
    projected,
    cosines,
    sines,
    places,
    norms,
    queries,
    keys,
    values,
    epsilon,
    heads,
    kv_heads,
    NORMED: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    VALUE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = projected + row * ((heads + kv_heads) * SIZE + kv_heads * VALUE)
    place = tl.load(places + row)
    if head < heads + kv_heads:
        i = tl.arange(0, HALF)
        there = i < TURNED // 2
        a = tl.load(source + head * SIZE + i, mask=there, other=0.0)
        b = tl.load(source + head * SIZE + TURNED // 2 + i, mask=there, other=0.0)
        cos = tl.load(cosines + row * (TURNED // 2) + i, mask=there, other=0.0)
        sin = tl.load(sines + row * (TURNED // 2) + i, mask=there, other=0.0)
        rest = tl.arange(0, REST)
        kept = tl.load(source + head * SIZE + TURNED + rest, mask=rest < SIZE - TURNED, other=0.0)
        if NORMED:
            weights = norms + tl.where(head < heads, 0, SIZE)
            total = _squares(a) + _squares(b) + _squares(kept)
            scale = tl.rsqrt(total / SIZE + epsilon)
            a = _scaled(a, scale, tl.load(weights + i, mask=there, other=0.0))
            b = _scaled(b, scale, tl.load(weights + TURNED // 2 + i, mask=there, other=0.0))
            kept = _scaled(kept, scale, tl.load(weights + TURNED + rest, mask=rest < SIZE - TURNED, other=0.0))
        first = a.to(tl.float32) * cos - b.to(tl.float32) * sin
        second = b.to(tl.float32) * cos + a.to(tl.float32) * sin
        if head < heads:
            to = queries + (row * heads + head) * SIZE
        else:
            to = keys + (place * kv_heads + head - heads) * SIZE
            first, second = _bounded(first, LIMIT), _bounded(second, LIMIT)
            kept = _bounded(kept.to(tl.float32), LIMIT).to(kept.dtype)
        tl.store(to + i, first.to(a.dtype), mask=there)
        tl.store(to + TURNED // 2 + i, second.to(a.dtype), mask=there)
        tl.store(to + TURNED + rest, kept, mask=rest < SIZE - TURNED)
    else:
        of = head - heads - kv_heads
        d = tl.arange(0, WIDE)
        v = tl.load(source + (heads + kv_heads) * SIZE + of * VALUE + d, mask=d < VALUE, other=0.0)
        v = _bounded(v.to(tl.float32), LIMIT).to(v.dtype)
        tl.store(values + (place * kv_heads + of) * VALUE + d, v, mask=d < VALUE)


class HeadNorms(NamedTuple):
    """Root-mean-square norms of each head.

    Attributes:
        weights: [2, size], of queries and of keys.
        epsilon: added to the mean square.
    """

    weights: torch.Tensor
    epsilon: float


def rotate(
    projected: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotate the queries and keys of rows (Su et al., arXiv 2104.09864), and store the keys and values, bounded.

    Args:
        projected: [rows, (heads + kv_heads) * size + kv_heads * value size], contiguous: queries, keys, values.
        cosines: float32 [rows, turned / 2]; entry i of a head turns with entry i + turned / 2, those from `turned` on
            stay as they are.
        sines: likewise.
        places: int64 [rows], positions in the cache, each at most once, those of padding aside.
        keys: the layer's keys in the cache, [positions, kv_heads, size].
        values: its values, [positions, kv_heads, value size].
        norms: those that queries and keys go through before; None for none.

    Returns:
        The queries, [rows, heads, size].
    """
    (_, kv_heads, size), value = keys.shape, values.shape[-1]
    rows, turned = len(projected), 2 * cosines.shape[1]
    heads = (projected.shape[1] - kv_heads * (size + value)) // size
    queries = projected.new_empty(rows, heads, size)
    _rotate[(rows, heads + 2 * kv_heads)](
        *(projected, cosines, sines, places, projected if norms is None else norms.weights, queries, keys, values),
        *(0.0 if norms is None else norms.epsilon, heads, kv_heads, norms is not None, size, turned, value),
        *(above(turned // 2), above(size - turned), above(value), most(keys.dtype)),
        **OPTIONS,
    )
    return queries


def rotate_reference(
    projected: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """The same by PyTorch's operators; arguments as `rotate`."""
    (_, kv_heads, size), value = keys.shape, values.shape[-1]
    half = cosines.shape[1]
    turned, v = projected.split((projected.shape[1] - kv_heads * value, kv_heads * value), 1)
    turned = turned.unflatten(1, (-1, size))
    if norms is not None:
        wide = turned.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norms.epsilon)).to(turned.dtype)
        of_queries, of_keys = scaled.split((turned.shape[1] - kv_heads, kv_heads), 1)
        turned = torch.cat([of_queries * norms.weights[0], of_keys * norms.weights[1]], 1)
    a, b = turned[..., :half].float(), turned[..., half : 2 * half].float()
    cos, sin = cosines[:, None], sines[:, None]
    turned = torch.cat([(a * cos - b * sin), (b * cos + a * sin), turned[..., 2 * half :].float()], -1).to(turned.dtype)
    keys[places] = bounded(turned[:, -kv_heads:])
    values[places] = bounded(v.unflatten(1, (-1, value)))
    return turned[:, :-kv_heads].contiguous()
