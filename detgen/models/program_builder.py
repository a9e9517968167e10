"""Builds the programs of a decoder from its description. Knows no devices."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.quantizing import STORAGE, Form, Quantized
from detgen.kernels.decoder import KVBuffers
from detgen.models.altup import StreamsSteps
from detgen.models.description import describe
from detgen.models.layer_inputs import LayerInputsSteps
from detgen.models.layer_steps import LayerSteps
from detgen.models.memory import give_back
from detgen.models.parts import Attention, Linear
from detgen.models.step_parts import Angles, Entries, Keep, NormParts, as_it_is, joint, wanted_of
from detgen.models.stored import Read, held, whole
from detgen.program import steps
from detgen.program.arrays import BFLOAT16, Array
from detgen.program.operands import LOGIT_BLOCK, SCORED, Buffer, Into, Weight, name_of
from detgen.program.program import Program
from detgen.program.storage import SMALLEST, Storage

_ROWS = 1 << 14  # rows of a table checked at once
_FREED = 128 << 20  # bytes, about, freed before memory is given back, since memory that is taken again must be cleared


class ProgramBuilder:
    """Holds the parts of a decoder's programs; it takes over the weights of `model`, whose layers are released.

    Args:
        model: a transformers decoder with a description; if its norm and output layer are identities, its outputs are
            hidden states.
        cache: where its keys and values are stored.
        traits: attention traits of each layer; None for a layer without attention.
        form: of its linear layers, as for `panels`.
        read: reads the weight of a parameter.
        keep: returns the array that steps read, given one made for them.

    Attributes:
        kind: class name of the model.
        outputs: entries of a row of results.
        group: the most query heads that share a key head.
    """

    def __init__(
        self,
        model: Any,
        cache: KVBuffers,
        traits: Sequence[AttentionTraits | None],
        form: Form = "none",
        read: Read = held,
        keep: Keep = as_it_is,
    ) -> None:
        self.kind = type(model).__name__
        described = describe(model)
        assert described is not None, "it has a description"
        described.read, described.table = read, None
        self._angles, self._keep, self._cache = Angles(keep), keep, cache
        embedding, places = described.embedding, described.positions
        self._embedding_factor, norm = described.embedding_factor, described.embedding_norm
        self._embedding_norm = None if norm is None else NormParts.of(norm, keep)
        self._places = None if places is None else (keep(places[0]), places[1])
        inputs = described.layer_inputs
        self._inputs = None if inputs is None else LayerInputsSteps(inputs, form, keep)
        self._hidden = Buffer("hidden", embedding.shape[1])
        streams = described.streams
        self._streams = None if streams is None else StreamsSteps(streams, self._hidden.width, form, keep)
        final, head = described.final, described.head
        self._final = None if final is None else NormParts.of(final, keep)
        self._before_head = None
        if (before := described.before_head) is not None:
            self._before_head = joint([before.linear], form, keep), before.activation, NormParts.of(before.norm, keep)
        self._head = None if head is None else joint([head], form, keep)
        self._embedding: Array | Weight
        if self._head is not None and head is not None and head.weight is embedding and _has(self._head, embedding):
            self._embedding = replace(self._head, bias=None)
        elif isinstance(embedding, Quantized) and embedding.storage.whole:
            self._embedding = joint([Linear(embedding, None)], "none", keep)
        else:
            self._embedding = keep(np.ascontiguousarray(whole(embedding)))
        self._head_factor, self._softcap = described.head_factor, described.softcap
        self.outputs = self._hidden.width if head is None else head.weight.shape[0]
        described.release_head()
        described.table = None
        del embedding, head, inputs
        self.group = 1
        self._layers: list[LayerSteps] = []
        sources = [described.source(i) for i in range(len(described.layers))]
        self._sources = [i if source is None else source for i, source in enumerate(sources)]
        freed = 0
        # Each layer is released before the next is built, so that memory holds at most one of them twice.
        for i in range(len(described.layers)):
            layer = described.layer(i)
            freed += 4 * sum(p.numel() for p in described.layers[i].parameters())
            for mixer in layer.mixers:
                if isinstance(mixer, Attention):
                    self.group = max(self.group, mixer.heads // mixer.kv_heads)
            self._layers.append(LayerSteps(layer, traits[i], self._hidden.width, form, keep))
            described.release(i)
            if freed >= _FREED:
                give_back()
                freed = 0

    def over(self, cache: KVBuffers) -> ProgramBuilder:
        """Return the same model over another cache."""
        other = copy(self)
        other._angles, other._cache = Angles(self._keep), cache
        return other

    @property
    def width(self) -> int:
        """Entries of a hidden state."""
        return self._hidden.width

    @property
    def slots(self) -> int:
        """Slots whose states fit; 0 if no layer keeps states."""
        return 0 if self._cache.states is None else self._cache.states.slots

    def reach(self, positions: int) -> int:
        """Extend the rotary angles to that many positions; return their number."""
        if positions > self._angles.positions:
            self._angles.reach(positions)
        return self._angles.positions

    @property
    def states(self) -> Buffer:
        """Takes vectors that are added to the hidden states."""
        return Buffer("states", self._hidden.width)

    @property
    def extracted(self) -> Buffer:
        """Takes the wanted hidden states."""
        return Buffer("extracted", self._hidden.width)

    def out(self, scored: bool) -> Buffer:
        """Return the buffer that takes the output of the wanted rows, or their scores."""
        return Buffer("out", SCORED if scored else self.outputs)

    def program(self, inject: int = -1, extract: int = -1, scored: bool = False) -> Program:
        """Build the steps of a pass, with or without an exchange at these layers, for logits or for scores."""
        if not self._angles.positions:
            self._angles.reach(1)
        hidden = self._hidden
        program = Program(*([self.states] if inject >= 0 else []))
        table, name, to = self._embedding, "embed_tokens", Into(hidden, factor=self._embedding_factor)
        if isinstance(table, Weight):
            program.add(steps.EmbedColumn(name=name, weight=table, to=to))
        else:
            program.add(steps.Embed(name=name, table=table, storage=STORAGE[name_of(table.dtype)], to=to))
        if self._embedding_norm is not None:
            program.add(self._embedding_norm.step("embed_tokens, normed", hidden, Into(hidden)))
        if self._places is not None:
            places, offset = self._places
            storage, to = STORAGE[name_of(places.dtype)], Into(hidden, add=True)
            program.add(
                steps.EmbedPositions(name="embed_positions", table=places, storage=storage, offset=offset, to=to)
            )
        if self._inputs is not None:
            self._inputs.build(program, hidden)
        if self._streams is not None:
            self._streams.begin(program, hidden)
        for i, (layer, source) in enumerate(zip(self._layers, self._sources, strict=True)):
            if i == inject:
                program.add(steps.Copy(name=f"layers.{i}, state added", x=self.states, to=Into(hidden, add=True)))
            if i == extract:
                program.add(steps.Copy(name=f"layers.{i}, input kept", x=hidden, to=Into(self.extracted)))
            states = None if self._cache.states is None else self._cache.states.layers[i]
            entries = Entries(self._cache.keys[source], self._cache.values[source], states)
            layer.build(program, f"layers.{i}", self._angles, entries, last=i == len(self._layers) - 1)
        x, out = wanted_of(hidden), self.out(scored)
        if self._streams is not None:
            self._streams.end(program, x)
        if self._final is not None:
            normed = Buffer("normed", hidden.width)
            program.add(self._final.step("norm", x, Into(normed), wanted=True))
            x = normed
        if self._before_head is not None:
            weight, activation, norm = self._before_head
            read = Buffer("read by the head", weight.outputs)
            program.add(
                steps.Linear(
                    name="before the head", wanted=True, x=x, to=Into(read), weight=weight, activation=activation
                )
            )
            program.add(norm.step("before the head, normed", read, Into(read), wanted=True))
            x = read
        self._finish(program, x, out, scored)
        return program

    def _finish(self, program: Program, x: Buffer, out: Buffer, scored: bool) -> None:
        """Append the steps that make the output of the last rows."""
        head, factor, softcap = self._head, self._head_factor, self._softcap
        if head is None:
            program.add(steps.Copy(name="the output", wanted=True, x=x, to=Into(out)))
        elif scored:
            blocks = Buffer("blocks", SCORED * -(-self.outputs // LOGIT_BLOCK))
            program.add(
                steps.ScoredLinear(
                    name="lm_head", wanted=True, x=x, to=blocks, weight=head, factor=factor, softcap=softcap
                )
            )
            program.add(steps.Score(name="scores", wanted=True, x=blocks, to=out))
        else:
            into = Into(out, factor=factor)
            program.add(steps.Linear(name="lm_head", wanted=True, x=x, to=into, weight=head, softcap=softcap))


def _has(packed: Weight, table: np.ndarray | Quantized) -> bool:
    """Return whether a packed output layer has exactly the numbers of a table."""
    if isinstance(table, Quantized):
        return table.storage.whole
    if packed.storage.paired:  # it has 0 for numbers that are too small for its products
        least = np.array(SMALLEST, BFLOAT16).view(np.uint16)
        for first in range(0, len(table), _ROWS):  # by their bits, since ml_dtypes compares them one by one
            magnitudes = table[first : first + _ROWS].view(np.uint16) & np.uint16(0x7FFF)
            if (magnitudes - np.uint16(1) < least - np.uint16(1)).any():  # 0 is not too small
                return False
        return True
    return packed.storage < Storage.BYTE
