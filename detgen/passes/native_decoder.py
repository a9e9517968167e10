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
from detgen.passes.building import Building
from detgen.passes.description import describe
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Packed
from detgen.passes.stored import Read, held
from detgen.program import steps
from detgen.program.rows import NOT_A_NUMBER, Rows, Take
from detgen.program.steps import SCORED

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
        program: builds the steps of passes, see `Building.program`.
        outputs: entries of a row of results.
        broken: a token whose embedding is NaN for now; None for none.
        take: is told what each step of a pass gives, where that is wanted.
    """

    concurrent = True

    def __init__(
        self, model: Any, cache: KVCache, traits: Sequence[AttentionTraits], bits: int = 0, read: Read = held
    ) -> None:
        self.kind = type(model).__name__
        self.take: Take | None = None
        self.cache = cache
        self.broken: int | None = None
        self._runners: dict[tuple[int, int, bool], Runner] = {}
        self._building = Building(model, cache, traits, bits, read)
        self.program, self.outputs = self._building.program, self._building.outputs

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
        building = self._building
        given = {building.out(scored): out}
        if exchange is not None:
            given[building.states] = exchange.states
            if exchange.extract >= 0:
                exchange.hidden = given[building.extracted] = torch.empty(len(packed.ids), building.width)
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
        if self._building.reach(positions):
            self._runners.clear()
        key = (-1, -1, scored) if exchange is None else (exchange.inject, exchange.extract, scored)
        if key not in self._runners:
            self._runners[key] = Runner(best_build(), self.program(*key))
        return self._runners[key]


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
