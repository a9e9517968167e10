"""The steps of a layer of a decoder: what mixes its rows, then a feed-forward or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.quantizing import Form
from detgen.models.altup import AltUpSteps, LaurelSteps
from detgen.models.attention_steps import AttentionSteps
from detgen.models.delta_nets import DeltaSteps
from detgen.models.feed_forward_steps import BesideSteps, ExpertSteps, FeedForwardSteps
from detgen.models.layer_inputs import LayerInputSteps
from detgen.models.mambas import MambaSteps, SelectiveMambaSteps
from detgen.models.parts import DeltaNet, FeedForward, Layer, Mamba, Mixer, SelectiveMamba, ShortConvolution
from detgen.models.short_convolutions import ShortConvolutionSteps
from detgen.models.step_parts import Angles, Branch, Entries, Keep, NormParts, taken
from detgen.program import steps
from detgen.program.operands import Buffer, Into
from detgen.program.program import Program
from detgen.program.states import Watch

MixerSteps: TypeAlias = AttentionSteps | DeltaSteps | ShortConvolutionSteps | MambaSteps | SelectiveMambaSteps


class LayerSteps:
    """The parts of a layer, as steps take them."""

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
        """Append the layer's steps; behind the mixers of the last layer, those of the wanted rows alone."""
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
        if self._parallel and mlp is not None:  # before the attention's results are added to what the mlp reads
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
        """Append a norm, if there is one; the buffer that holds what is read after it."""
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
