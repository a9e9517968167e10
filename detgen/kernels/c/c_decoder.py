"""A decoder that runs a whole pass in one call, in the arithmetic `detgen-2`.

It runs the decoders that `families` knows, on the CPU. Every sum has a fixed order, so a row has the same bits in any
pass, on any processor; see docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from detgen.kernels import choosing
from detgen.kernels.c.library import Runner, best_build
from detgen.kernels.decoder import KVBuffers
from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Ends, InputBatch
from detgen.kernels.logprobs import Scores
from detgen.kernels.program_decoder import FewerBits, ProgramDecoder, Programs
from detgen.kernels.sampling import Choices
from detgen.program import steps
from detgen.program.operands import ARITHMETIC, SCORED


class CDecoder(ProgramDecoder):
    """A model whose whole pass is one call of the compiled library.

    Args:
        programs: of the model.
        fewer: see `ProgramDecoder`.

    Attributes:
        concurrent: see `Decoder`; a decoder holds no state during a pass.
        kept: see `Chaining`.
        stops: see `Chaining`.
        reads: see `Chaining`.
        rounding: see `Decoder`.
    """

    concurrent = stops = True
    reads = False
    rounding = None

    def __init__(self, programs: Programs, fewer: FewerBits | None = None) -> None:
        super().__init__(programs, fewer)
        self.kept = self.outputs
        self._runners: dict[tuple[int, int, bool], Runner] = {}

    def over(self, cache: KVBuffers) -> CDecoder:
        """See `Decoder`."""
        return CDecoder(self._programs.over(cache))

    @property
    def chaining(self) -> CDecoder | None:
        """See `Decoder`."""
        return self if self._broken is None else None

    def run(
        self,
        batch: InputBatch,
        exchange: Exchange | None = None,
        broken: list[int] | None = None,
        *,
        scored: bool = False,
        choices: Callable[[], Choices] | None = None,
    ) -> np.ndarray | Scores:
        """See `Decoder`; returns logits where tokens are chosen by other means."""
        runner = self._runner(exchange, batch.longest, scored)
        out = np.empty((len(batch.wanted), SCORED if scored else self.outputs), np.float32)
        given = self._exchanged(exchange, len(batch.ids))
        given[self._programs.out(scored)] = out
        found = runner.run(self._with_broken(batch.rows), given, self._take, exact=self._exact)
        if broken is not None and found.any():
            broken += found.nonzero()[0].tolist()
        out = out[: batch.count]
        return Scores.of(out) if scored else out

    def chain(self, batch: InputBatch, lengths: np.ndarray, ends: Ends | None = None) -> tuple[Scores, list[int]]:
        """See `Chaining`."""
        runner = self._runner(None, _reach(batch, lengths), True)
        scored, broken = runner.chain(batch.rows, _wanting(batch), lengths, ends)
        there = _standing(lengths, broken)
        scores = Scores.of(scored[there])
        scores.finite[broken[there]] = False
        return scores, []

    def sample(
        self, batch: InputBatch, lengths: np.ndarray, choices: Choices, ends: Ends | None = None
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """See `Chaining`."""
        logits = np.empty((len(batch.windows), int(lengths.max()), self.outputs), np.float32)
        guessed, broken = self._guess(batch, lengths, choices, ends, logits)
        there = _standing(lengths, broken)
        rows = logits.reshape(-1, self.outputs) if there.all() else logits[there]
        return guessed[there], rows, np.flatnonzero(broken[there]).tolist()

    def draft(self, batch: InputBatch, lengths: np.ndarray, choices: Choices) -> list[list[int]]:
        """See `Chaining`."""
        guessed, _ = self._guess(batch, lengths, choices)
        return [of[of >= 0].tolist() for of in guessed]

    def _guess(
        self,
        batch: InputBatch,
        lengths: np.ndarray,
        choices: Choices,
        ends: Ends | None = None,
        logits: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Runner.draft`."""
        runner = self._runner(None, _reach(batch, lengths), False)
        draws = choosing.draws(self.outputs, choices.how())
        return runner.draft(batch.rows, _wanting(batch), lengths, draws, ends, logits)

    def _again(self, fewer: FewerBits) -> CDecoder:
        return CDecoder(self._programs, fewer)

    def profile(self) -> dict[str, Any]:
        """See `Decoder`; the bytes are the same on any machine."""
        return {"arithmetic": ARITHMETIC}

    def operations(self) -> dict[str, int]:
        """Return a step for each distinct linear layer (inputs→outputs) and for the attention, for `alone`."""
        made = list(enumerate(self._runner(None, 1, False).program.steps))
        found = {f"{s.weight.inputs}→{s.weight.columns}": i for i, s in made if isinstance(s, steps.Linear)}
        attention = next(i for i, s in made if isinstance(s, steps.Attend))
        return {**dict(sorted(found.items())), "attention": attention}

    def alone(self, step: int, batch: InputBatch) -> np.ndarray:
        """Run one step on random rows, the n-th of which is the same in each call; return float32 [rows, width].

        Args:
            step: one of `operations`.
            batch: a pass that wants all of its rows.
        """
        runner = self._runner(None, 1, False)
        width = runner.program.steps[step].reads[0].width
        x = np.random.default_rng(2).standard_normal((len(batch.ids), width), np.float32)
        return runner.alone(step, x, batch.rows)

    def _runner(self, exchange: Exchange | None, positions: int, scored: bool) -> Runner:
        """Return the runner of passes with such an exchange and such results, up to that many positions."""
        if self._outgrown(positions):
            self._runners.clear()
        key = (-1, -1, scored) if exchange is None else (exchange.inject, exchange.extract, scored)
        if key not in self._runners:
            self._runners[key] = Runner(best_build(), self.program(*key))
        return self._runners[key]


def _reach(batch: InputBatch, lengths: np.ndarray) -> int:
    """Return the most positions that a chain of passes can reach."""
    return int(batch.longest + lengths.max())


def _wanting(batch: InputBatch) -> np.ndarray:
    """Return the slots whose windows want a row, int64 [n]."""
    return batch.windows.slots[batch.windows.logits > 0]


def _standing(lengths: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Return which sequences take part in which passes of `broken`, bool [sequences, passes]."""
    found: np.ndarray = np.arange(broken.shape[1]) < lengths[:, None]
    return found
