"""A decoder whose whole pass is one call, in the arithmetic `detgen-1`.

It takes over the weights of the decoders that `families` knows, on the CPU. Every sum has an order of its own, so a row
has the same bits in any pass, on any processor; see docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from detgen.kernels.attention import AttentionTraits
from detgen.kernels.native.library import NOT_A_NUMBER, Ends, Rows, Runner, Take, best_build
from detgen.kernels.native.panels import STORAGE
from detgen.kernels.native.program import BLOCK, SCORED, Builder, Kind
from detgen.passes.description import describe
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.memory import give_back
from detgen.passes.native_layers import Angles, Fields, LayerSteps, linear_fields, norm_fields
from detgen.passes.packing import Packed
from detgen.passes.stored import Read, held

ARITHMETIC = "detgen-1"  # the name of what docs/numerics.md states


class NativeDecoder:
    """A whole decoder; it takes over the weights of `model`, whose layers and output layer are released.

    Args:
        model: one that `is_native`.
        cache: where its keys and values are stored.
        traits: attention traits of each layer.
        bits: 8 or 4 to quantize its linear layers; 0 leaves them as they are.
        read: gives the weight of a parameter.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at a time; it holds no state during a pass.
        cache: as above.
        outputs: entries of a row of results.
        broken: a token whose embedding is NaN for now; None for none.
        take: is told what each step of a pass gives, where that is wanted.
    """

    concurrent = True

    def __init__(
        self, model: Any, cache: KVCache, traits: Sequence[AttentionTraits], bits: int = 0, read: Read = held
    ) -> None:
        described = describe(model)
        assert described is not None, "see `is_native`"
        described.read, described.table = read, None
        self.kind = type(model).__name__
        self.take: Take | None = None
        self.cache = cache
        self.broken: int | None = None
        self._runners: dict[tuple[int, int, bool], Runner] = {}
        self._angles = Angles()
        self._embedding = described.embedding
        self._embedding_factor = described.embedding_factor
        self._places = described.positions
        self._hidden = self._embedding.shape[1]
        self._final, head = described.final, described.head
        self._head = None if head is None else linear_fields([head], bits)
        self._head_factor, self._softcap = described.head_factor, described.softcap
        self.outputs = self._hidden if head is None else head.weight.shape[0]
        described.release_head()
        self._layers: list[LayerSteps] = []
        # Each layer is released before the next is built, so that memory holds at most one of them twice.
        for i in range(len(described.layers)):
            layer = LayerSteps(described.layer(i), cache.keys[i], cache.values[i], traits[i], self._hidden, bits)
            self._layers.append(layer)
            described.release(i)
            give_back()

    def run(
        self, packed: Packed, exchange: Exchange | None, broken: list[int] | None, *, scored: bool = False
    ) -> torch.Tensor:
        """A pass.

        Args:
            packed: its rows.
            exchange: brings a state for each row, and takes their hidden states.
            broken: takes the rows whose keys of the last layer are not finite, ascending.
            scored: whether only scores of the logits are wanted, which are then not stored.

        Returns:
            Logits of the rows that are wanted, float32 [n, vocabulary], or their `Scores.of` as float32 [n, 4]; without
            an output layer, their hidden states.
        """
        runner = self._runner(exchange, int((packed.windows.starts + packed.windows.lengths).max()), scored)
        out = torch.empty(len(packed.wanted), SCORED if scored else self.outputs)
        given = {runner.buffers["out"]: out}
        if exchange is not None:
            given[runner.buffers["states"]] = exchange.states
            if exchange.extract >= 0:
                exchange.hidden = given[runner.buffers["extracted"]] = torch.empty(len(packed.ids), self._hidden)
        rows = rows_of(packed)
        if self.broken is not None:
            rows = rows._replace(ids=rows.ids.masked_fill(rows.ids == self.broken, NOT_A_NUMBER))
        found = runner.run(rows, given, self.take)
        if broken is not None and found.any():
            broken += found.nonzero()[:, 0].tolist()
        return out

    def chain(self, packed: Packed, lengths: np.ndarray, ends: Ends | None = None) -> tuple[torch.Tensor, np.ndarray]:
        """Passes one after the other, in which sequences go on with their largest logits.

        Args:
            packed: the first pass, whose windows want one row each, or none.
            lengths: see `Runner.chain`, like the result.
            ends: likewise.
        """
        runner = self._runner(None, _reach(packed, lengths), True)
        return runner.chain(rows_of(packed), _wanting(packed), lengths, ends)

    def draft(
        self,
        packed: Packed,
        lengths: np.ndarray,
        draws: bytes,
        ends: Ends | None = None,
        logits: torch.Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Passes one after the other, in which sequences go on with what their sampling is likely to choose.

        Args:
            packed: the first pass, whose windows want one row each, or none.
            lengths: see `Runner.draft`, like the result.
            draws: likewise.
            ends: likewise.
            logits: likewise.
        """
        runner = self._runner(None, _reach(packed, lengths), False)
        return runner.draft(rows_of(packed), _wanting(packed), lengths, draws, ends, logits)

    def operations(self) -> dict[str, int]:
        """The distinct linear layers (inputs→outputs) and the attention: a step of each, for `alone`."""
        steps = self._runner(None, 1, False).steps
        found = {f"{s.inputs}→{s.columns}": i for i, s in enumerate(steps) if s.kind == Kind.LINEAR}
        attention = next(i for i, s in enumerate(steps) if s.kind == Kind.ATTEND)
        return {**dict(sorted(found.items())), "attention": attention}

    def alone(self, step: int, packed: Packed) -> torch.Tensor:
        """What one step makes of random rows, whose n-th is the same in each call, float32 [rows, width].

        Args:
            step: one of `operations`.
            packed: a pass all of whose rows are wanted.
        """
        runner = self._runner(None, 1, False)
        width = runner.width(runner.steps[step].source)
        x = torch.randn(len(packed.ids), width, generator=torch.Generator().manual_seed(2))
        return runner.alone(step, x, rows_of(packed))

    def _runner(self, exchange: Exchange | None, positions: int, scored: bool) -> Runner:
        """The steps of passes with such an exchange and such results, up to that many positions."""
        if positions > self._angles.positions:
            self._angles.reach(positions)
            self._runners.clear()
        key = (-1, -1, scored) if exchange is None else (exchange.inject, exchange.extract, scored)
        if key not in self._runners:
            library = best_build()
            assert library is not None, "see `is_native`"
            self._runners[key] = Runner(library, self._steps(*key))
        return self._runners[key]

    def _steps(self, inject: int, extract: int, scored: bool) -> Builder:
        """The steps of passes, with or without an exchange at these layers, for logits or their scores."""
        b, width = Builder(), self._hidden
        for name in ("hidden", "normed", "wanted hidden"):
            b.buffer(name, width)
        b.buffer("out", SCORED if scored else self.outputs)
        if inject >= 0:
            b.buffer("states", width)
        if extract >= 0:
            b.buffer("extracted", width)
        table: Fields = {"weight": self._embedding, "storage": STORAGE[self._embedding.dtype], "columns": width}
        b.step("embed_tokens", Kind.EMBED, to="hidden", **table, factor=self._embedding_factor)
        if self._places is not None:
            places, offset = self._places
            table = {"weight": places, "storage": STORAGE[places.dtype], "columns": width, "offset": offset}
            b.step("embed_positions", Kind.EMBED, to="hidden", **table, variant=1, add=1)
        for i, layer in enumerate(self._layers):
            if i == inject:
                b.step(f"layers.{i}, state added", Kind.COPY, source="states", to="hidden", columns=width, add=1)
            if i == extract:
                b.step(f"layers.{i}, input kept", Kind.COPY, source="hidden", to="extracted", columns=width)
            layer.build(b, f"layers.{i}", self._angles, last=i == len(self._layers) - 1)
        source = "wanted hidden"
        if self._final is not None:
            b.step("norm", Kind.NORM, **norm_fields(self._final), source=source, to="normed", wanted=1)
            source = "normed"
        if self._head is None:
            b.step("the output", Kind.COPY, source=source, to="out", columns=width, wanted=1)
        else:
            last: Fields = {"factor": self._head_factor, "softcap": self._softcap, "wanted": 1}
            if scored:
                blocks = -(-self.outputs // BLOCK)
                b.buffer("blocks", SCORED * blocks)
                b.step("lm_head", Kind.LINEAR, **self._head, **last, source=source, to="blocks", scored=self.outputs)
                b.step("scores", Kind.SCORE, source="blocks", to="out", inputs=blocks, wanted=1)
            else:
                b.step("lm_head", Kind.LINEAR, **self._head, **last, source=source, to="out")
        return b


def _reach(packed: Packed, lengths: np.ndarray) -> int:
    """Positions that a chain of passes reaches at most."""
    return int((packed.windows.starts + packed.windows.lengths).max() + lengths.max())


def _wanting(packed: Packed) -> np.ndarray:
    """The slots whose windows want a row, int64 [n]."""
    return packed.windows.slots[packed.windows.logits > 0]


def rows_of(packed: Packed) -> Rows:
    """The rows of a pass, as programs take them."""
    return Rows(packed.ids, packed.positions, packed.kv_positions, packed.wanted, *packed.paged)


def is_native(model: Any) -> bool:
    """Whether there is a native decoder of a loaded model here.

    Args:
        model: a transformers decoder, whose parameters may be on `meta`; with the identity for its norm and its output
            layer, it gives hidden states.
    """
    return runs_natively(model.device) and describe(model) is not None


def runs_natively(device: torch.device) -> bool:
    """Whether programs run on a device: on a CPU for which they were compiled; weights on `meta` will be there."""
    return device.type in ("cpu", "meta") and best_build() is not None
