"""Builds the steps of a decoder's layer: its mixers, such as an attention, then a feed-forward or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.quantizing import STORAGE, Form
from detgen.models.altup import AltUpSteps, LaurelSteps
from detgen.models.delta_nets import DeltaSteps
from detgen.models.feed_forward_steps import BesideSteps, ExpertSteps, FeedForwardSteps
from detgen.models.latent import LatentSteps
from detgen.models.layer_inputs import LayerInputSteps
from detgen.models.mambas import MambaSteps, SelectiveMambaSteps
from detgen.models.parts import (
    Attention,
    DeltaNet,
    FeedForward,
    Latent,
    Layer,
    Mamba,
    Mixer,
    SelectiveMamba,
    ShortConvolution,
)
from detgen.models.short_convolutions import ShortConvolutionSteps
from detgen.models.step_parts import Angles, Branch, Entries, Keep, NormParts, joint, side_by_side, taken
from detgen.program import steps
from detgen.program.operands import Buffer, Cache, Into, name_of
from detgen.program.program import Program
from detgen.program.states import Watch


class AttentionSteps:
    """Builds the steps of an attention.

    Attributes:
        name: name of the module.
        out: the linear layer that its results go through.
        factor: multiplies the results of `out`.
        ends: name of `out`.
        keeps: whether it stores keys and values of its own.
    """

    name, ends = "self_attn", "o_proj"

    def __init__(self, attention: Attention, traits: AttentionTraits, form: Form, keep: Keep) -> None:
        heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
        self._heads = {"heads": heads, "kv_heads": kv_heads, "size": size, "values": attention.values}
        self._traits, self._scale = traits, traits.scale * (attention.query_scale or 1.0)
        self._rotary, self._interleaved = attention.rotary, attention.interleaved
        self._rotated_first, self._tuning = attention.rotated_first, attention.tuning
        self._bound = attention.bound
        sizes = heads * size, kv_heads * size, kv_heads * attention.kept[2]
        found, self._norms = 0, []  # for each norm: its part, first entry, and parameters
        for part, entries, norm in zip("qkv", sizes, attention.head_norms, strict=True):
            if norm is not None:
                self._norms.append((part, found, NormParts.of(norm, keep, entries)))
            found += entries
        self.keeps = attention.source is None
        self._row = found if self.keeps else heads * size
        self._sinks = None if attention.sinks is None else keep(attention.sinks)
        self._slopes = None if traits.slopes is None else keep(np.array(traits.slopes, np.float32))
        self._latent, self._qkv = None, []
        if isinstance(attention.qkv, Latent):
            self._latent = LatentSteps(attention, attention.qkv, form, keep)
        else:
            self._qkv = side_by_side(attention.qkv, form, keep)
        self.out, self.factor = joint([attention.out], form, keep), attention.out.factor
        self._gate = None if attention.gate is None else joint([attention.gate], form, keep)

    def build(self, program: Program, name: str, read: Buffer, angles: Angles, where: Entries, *, last: bool) -> Buffer:
        """Append the steps; return the buffer of results, which in the last layer has only the wanted rows."""
        keys, kept = where.keys, where.values if self._latent is None else None
        cache = Cache(**self._heads, keys=keys, kept=kept, storage=STORAGE[name_of(keys.dtype)])
        attended = Buffer("attended", cache.heads * cache.values)
        qkv = Buffer("qkv", self._row)
        if self._latent is not None:
            self._latent.build(program, name, read, qkv)
        for at, weight, factor in self._qkv:
            part = f"{name}.qkv_proj" + (f", from {at} on" if at else "")
            program.add(steps.Linear(name=part, x=read, to=Into(qkv, factor=factor), at=at, weight=weight))
        store = steps.Rotate(name=f"{name}, rotated", qkv=qkv, cache=cache, last=last and self.keeps)
        if self._tuning is not None:
            store = replace(store, factors=angles.factors(self._tuning))
        if self._rotary is not None:
            cosines, sines = angles.of(self._rotary)
            turned = replace(
                store,
                turned=2 * len(self._rotary.frequencies),
                interleaved=self._interleaved,
                cosines=cosines,
                sines=sines,
            )
            if self._norms and self._rotated_first:  # what is stored here is stored again after the norms
                program.add(replace(turned, name=f"{name}, rotated before the norms", factors=None, last=False))
            else:
                store = turned
        for part, at, norm in self._norms:
            program.add(norm.step(f"{name}.{part}_norm", qkv, Into(qkv), at=at))
        if self._bound:
            program.add(steps.Copy(name=f"{name}, clamped", x=qkv, to=Into(qkv), bound=self._bound))
        program.add(store)
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
                slopes=self._slopes,
                sinks=self._sinks,
            )
        )
        if last:
            attended = taken(program, "rows wanted, attended", attended)
        if self._latent is not None:
            attended = self._latent.finish(program, name, attended, wanted=last)
        if self._gate is not None:
            gates = Buffer("gates", self._gate.outputs)
            read = taken(program, "rows wanted, normed", read) if last else read
            program.add(steps.Linear(name=f"{name}.gate", wanted=last, x=read, to=Into(gates), weight=self._gate))
            program.add(steps.Gate(name=f"{name}, gated", wanted=last, x=attended, gates=gates, to=Into(attended)))
        return attended


MixerSteps: TypeAlias = AttentionSteps | DeltaSteps | ShortConvolutionSteps | MambaSteps | SelectiveMambaSteps


class LayerSteps:
    """Builds the steps of a layer."""

    def __init__(
        self,
        layer: Layer,
        traits: AttentionTraits | None,
        width: int,
        form: Form,
        keep: Keep,
    ) -> None:
        mlp = layer.mlp
        self._width = width
        self._mixers = [_mixer_steps(mixer, traits, form, keep) for mixer in layer.mixers]
        self._norms = [None if norm is None else NormParts.of(norm, keep) for norm in layer.norms]
        self._mlp: FeedForwardSteps | ExpertSteps | None = None
        if isinstance(mlp, FeedForward):
            self._mlp = FeedForwardSteps(mlp, form, keep)
        elif mlp is not None:
            self._mlp = ExpertSteps(mlp, form, keep)
        self._parallel, self._residual = layer.parallel, layer.residual
        self._added_to_normed = layer.added_to_normed
        self._beside = None if layer.beside is None else BesideSteps(layer.beside, form, keep)
        self._input = None if layer.input is None else LayerInputSteps(layer.input, form, keep)
        self._factor = layer.factor
        self._laurel = None if layer.laurel is None else LaurelSteps(layer.laurel, form, keep)
        self._altup = None if layer.altup is None else AltUpSteps(layer.altup, width, form, keep)

    def build(self, program: Program, name: str, angles: Angles, where: Entries, *, last: bool) -> None:
        """Append the layer's steps; in the last layer, those after the mixers see only the wanted rows."""
        hidden = read = Buffer("hidden", self._width)
        before, after, before_mlp, after_mlp = self._norms
        if self._altup is not None:
            self._altup.predict(program, name, hidden)
        if last and not any(isinstance(mixer, AttentionSteps) and mixer.keeps for mixer in self._mixers):
            program.add(Watch(name=f"{name}, watched", x=hidden))
        if self._mixers:
            read = self._normed(program, f"{name}.norm before the attention", before, hidden)
        mixed = [mixer.build(program, f"{name}.{mixer.name}", read, angles, where, last=last) for mixer in self._mixers]
        if last:
            hidden = taken(program, "rows wanted", hidden)
            if self._altup is not None:
                self._altup.take(program)
            if self._laurel is not None or (self._parallel and before is not None and before_mlp is None):
                read = taken(program, "rows wanted, normed", read)
        mlp = self._mlp
        if self._parallel and mlp is not None:  # before the attention's results are added to the mlp's input
            if before_mlp is not None:
                read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            elif before is None:
                read = hidden
            mlp.open(program, f"{name}.mlp", read, wanted=last)
        into = Into(hidden, add=True, factor=self._residual)
        for mixer, x in zip(self._mixers, mixed, strict=True):
            branch = Branch(replace(into, factor=into.factor * mixer.factor), after, last)
            branch.add(program, f"{name}.{mixer.name}.{mixer.ends}", mixer.out, x)
        if self._laurel is not None:
            self._laurel.build(program, name, read, hidden, wanted=last)
        if mlp is not None and not self._parallel:
            read = self._normed(program, f"{name}.norm before the mlp", before_mlp, hidden, wanted=last)
            mlp.open(program, f"{name}.mlp", read, wanted=last)
        branch = Branch(into, after_mlp, last)
        if mlp is not None and self._beside is None:
            mlp.close(program, f"{name}.mlp", branch)
        elif mlp is not None and self._beside is not None:
            self._beside.build(program, name, hidden, mlp, branch)
        into = Into(hidden, add=True)
        if self._altup is not None:
            into = Into(self._altup.correct(program, name, hidden, wanted=last))
        if self._input is not None:
            self._input.build(program, name, Branch(into, None, last))
        if self._altup is not None:
            self._altup.add(program, name, into.buffer, wanted=last)
        if self._factor != 1:
            into = Into(hidden, factor=self._factor)
            program.add(steps.Copy(name=f"{name}, times {self._factor:g}", x=hidden, to=into, wanted=last))

    def _normed(
        self, program: Program, name: str, norm: NormParts | None, x: Buffer, *, wanted: bool = False
    ) -> Buffer:
        """Append a norm, if there is one; return the buffer to read from then on."""
        if norm is None:
            return x
        normed = x if self._added_to_normed else Buffer("normed", self._width)
        program.add(norm.step(name, x, Into(normed), wanted=wanted))
        return normed


def _mixer_steps(mixer: Mixer, traits: AttentionTraits | None, form: Form, keep: Keep) -> MixerSteps:
    if isinstance(mixer, DeltaNet):
        return DeltaSteps(mixer, form, keep)
    if isinstance(mixer, ShortConvolution):
        return ShortConvolutionSteps(mixer, form, keep)
    if isinstance(mixer, Mamba):
        return MambaSteps(mixer, form, keep)
    if isinstance(mixer, SelectiveMamba):
        return SelectiveMambaSteps(mixer, form, keep)
    assert traits is not None, "it was recorded"
    return AttentionSteps(mixer, traits, form, keep)
