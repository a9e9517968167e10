"""The steps of an attention."""

from __future__ import annotations

from dataclasses import replace

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.quantizing import STORAGE, Form
from detgen.models.parts import Attention
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, joint, side_by_side, taken
from detgen.program import steps
from detgen.program.operands import Buffer, Cache, Into
from detgen.program.program import Program


class AttentionSteps:
    """An attention, as steps take it.

    Attributes:
        name: of the module.
        out: what its results go through.
        ends: name of that.
    """

    name, ends = "self_attn", "o_proj"

    def __init__(self, attention: Attention, traits: AttentionTraits, form: Form, keep: Keep) -> None:
        heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
        self._queries, self._keys = heads * size, kv_heads * size
        self._heads = {"heads": heads, "kv_heads": kv_heads, "size": size, "values": size}
        self._traits, self._scale = traits, traits.scale * (attention.query_scale or 1.0)
        self._rotary, self._interleaved = attention.rotary, attention.interleaved
        sizes = zip("qk", (self._queries, self._keys), attention.head_norms, strict=True)
        self._norms = {part: NormParts.of(norm, keep, entries) for part, entries, norm in sizes if norm is not None}
        self._sinks = None if attention.sinks is None else keep(attention.sinks)
        self._qkv, self.out = side_by_side(attention.qkv, form, keep), joint([attention.out], form, keep)

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append its steps; the buffer of its results, in the last layer those of the wanted rows."""
        keys = where.keys
        cache = Cache(**self._heads, keys=keys, kept=where.values, storage=STORAGE[keys.dtype])
        attended, qkv = Buffer("attended", self._queries), Buffer("qkv", self._queries + 2 * self._keys)
        for at, weight in self._qkv:
            part = f"{name}.qkv_proj" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=Into(qkv), at=at, weight=weight))
        for part, norm in self._norms.items():
            at = 0 if part == "q" else self._queries
            program.add(norm.step(f"{name}.{part}_norm", qkv, Into(qkv), at=at))
        program.add(self._rotated(f"{name}, rotated", qkv, cache, angles, last=last))
        program.add(
            steps.Attend(
                name=name,
                qkv=qkv,
                cache=cache,
                to=attended,
                scale=self._scale,
                window=self._traits.window or 0,
                chunk=self._traits.chunk or 0,
                softcap=self._traits.softcap or 0.0,
                sinks=self._sinks,
            )
        )
        if last:
            attended = taken(program, "rows wanted, attended", attended)
        return attended

    def _rotated(self, name: str, qkv: Buffer, cache: Cache, angles: Angles, *, last: bool) -> steps.Rotate:
        plain = steps.Rotate(name=name, qkv=qkv, cache=cache, interleaved=self._interleaved, last=last)
        if self._rotary is None:
            return plain
        cosines, sines = angles.of(self._rotary)
        return replace(plain, turned=2 * len(self._rotary.frequencies), cosines=cosines, sines=sines)
