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
from detgen.kernels.native.layout import Draws
from detgen.kernels.native.library import Ends, Runner, best_build
from detgen.kernels.native.panels import STORAGE
from detgen.passes.description import describe
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.memory import give_back
from detgen.passes.native_layers import Angles, LayerSteps, NormParts, joint
from detgen.passes.packing import Packed
from detgen.passes.stored import Read, held
from detgen.program import steps
from detgen.program.program import Program
from detgen.program.rows import NOT_A_NUMBER, Rows, Take
from detgen.program.steps import LOGIT_BLOCK, SCORED, Buffer, Into

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
        self._hidden = Buffer("hidden", self._embedding.shape[1])
        final, head = described.final, described.head
        self._final = None if final is None else NormParts.of(final)
        self._head = None if head is None else joint([head], bits)
        self._head_factor, self._softcap = described.head_factor, described.softcap
        self.outputs = self._hidden.width if head is None else head.weight.shape[0]
        described.release_head()
        self._layers: list[LayerSteps] = []
        # Each layer is released before the next is built, so that memory holds at most one of them twice.
        for i in range(len(described.layers)):
            layer = LayerSteps(described.layer(i), cache.keys[i], cache.values[i], traits[i], self._hidden.width, bits)
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
        given = {self._out(scored): out}
        if exchange is not None:
            given[self._states] = exchange.states
            if exchange.extract >= 0:
                exchange.hidden = given[self._extracted] = torch.empty(len(packed.ids), self._hidden.width)
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
        draws: Draws,
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
        made = list(enumerate(self._runner(None, 1, False).program.steps))
        found = {f"{s.weight.inputs}→{s.weight.columns}": i for i, s in made if isinstance(s, steps.Linear)}
        attention = next(i for i, s in made if isinstance(s, steps.Attend))
        return {**dict(sorted(found.items())), "attention": attention}

    def alone(self, step: int, packed: Packed) -> torch.Tensor:
        """What one step makes of random rows, whose n-th is the same in each call, float32 [rows, width].

        Args:
            step: one of `operations`.
            packed: a pass all of whose rows are wanted.
        """
        runner = self._runner(None, 1, False)
        width = runner.program.steps[step].reads[0].width
        x = torch.randn(len(packed.ids), width, generator=torch.Generator().manual_seed(2))
        return runner.alone(step, x, rows_of(packed))

    def _runner(self, exchange: Exchange | None, positions: int, scored: bool) -> Runner:
        """The steps of passes with such an exchange and such results, up to that many positions."""
        if positions > self._angles.positions:
            self._angles.reach(positions)
            self._runners.clear()
        key = (-1, -1, scored) if exchange is None else (exchange.inject, exchange.extract, scored)
        if key not in self._runners:
            self._runners[key] = Runner(best_build(), self.program(*key))
        return self._runners[key]

    @property
    def _states(self) -> Buffer:
        return Buffer("states", self._hidden.width)

    @property
    def _extracted(self) -> Buffer:
        return Buffer("extracted", self._hidden.width)

    def _out(self, scored: bool) -> Buffer:
        return Buffer("out", SCORED if scored else self.outputs)

    def program(self, inject: int = -1, extract: int = -1, scored: bool = False) -> Program:
        """The steps of passes, with or without an exchange at these layers, for logits or their scores."""
        if not self._angles.positions:
            self._angles.reach(1)
        hidden = self._hidden
        program = Program(*([self._states] if inject >= 0 else []))
        table, to = self._embedding, Into(hidden, factor=self._embedding_factor)
        program.add(steps.Embed(name="embed_tokens", table=table, storage=STORAGE[table.dtype], to=to))
        if self._places is not None:
            table, offset = self._places
            storage, to = STORAGE[table.dtype], Into(hidden, add=True)
            program.add(
                steps.EmbedPositions(name="embed_positions", table=table, storage=storage, offset=offset, to=to)
            )
        for i, layer in enumerate(self._layers):
            if i == inject:
                program.add(steps.Copy(name=f"layers.{i}, state added", x=self._states, to=Into(hidden, add=True)))
            if i == extract:
                program.add(steps.Copy(name=f"layers.{i}, input kept", x=hidden, to=Into(self._extracted)))
            layer.build(program, f"layers.{i}", self._angles, last=i == len(self._layers) - 1)
        x, out = Buffer("wanted hidden", hidden.width), self._out(scored)
        if self._final is not None:
            normed = Buffer("normed", hidden.width)
            program.add(self._final.step("norm", x, Into(normed), wanted=True))
            x = normed
        self._finish(program, x, out, scored)
        return program

    def _finish(self, program: Program, x: Buffer, out: Buffer, scored: bool) -> None:
        """Append what makes the output of the last rows."""
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
    """Whether there is a native decoder of a loaded model: on a CPU; weights on `meta` will be there.

    Args:
        model: a transformers decoder, whose parameters may be on `meta`; with the identity for its norm and its output
            layer, it gives hidden states.
    """
    return model.device.type in ("cpu", "meta") and describe(model) is not None
