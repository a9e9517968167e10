"""A decoder on CUDA: programs of steps, run by kernels in Triton, and recorded for each rung of a ladder of row counts.

It has the bits of the decoder on a CPU. All that a pass needs to know reaches the device by one copy into buffers that
stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, SHARING, AttentionTraits
from detgen.kernels.judging import Scores
from detgen.kernels.sampling import Choices
from detgen.kernels.triton.launching import on
from detgen.kernels.triton.runner import TritonRunner
from detgen.kernels.triton.sampling import choose_by, unpack
from detgen.passes.building import Building
from detgen.passes.exchange import Exchange
from detgen.passes.kv_cache import KVCache
from detgen.passes.packing import Packed
from detgen.passes.replaying import Replaying
from detgen.passes.stored import Read, held
from detgen.program.rows import NOT_A_NUMBER, Rows, Take

_LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # row counts of passes, as far as they go
_MOST_RECORDED = 512  # rows of a pass: what larger ones launch takes longer than launching it
_IN_FLIGHT = 16  # most passes that are launched before the first one's results are read
_LEAST_BLOCKS = 4  # of the contexts of a recorded pass, whose number is a power of two


class Key(NamedTuple):
    """The shape of passes that are recorded as one.

    Attributes:
        rows: how many.
        wanted: those whose logits are wanted.
        pieces: of their windows.
        blocks: of the longest context.
    """

    rows: int
    wanted: int
    pieces: int
    blocks: int


class _Statics:
    """Where the passes of some shape find what they are about, and leave their results.

    Args:
        key: the shape.
        outputs: entries of a row of results.
        device: of the buffers.
        replaying: brings them there.
    """

    def __init__(self, key: Key, outputs: int, device: torch.device, replaying: Replaying) -> None:
        rows, wanted, pieces, blocks = key
        counts = [rows, rows, rows, wanted, 4 * pieces, pieces * blocks]
        self._replaying = replaying
        self._hosts = [replaying.host(sum(counts), torch.int64) for _ in range(_IN_FLIGHT)]
        self._fills = 0
        self._sent = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._parts = [np.split(host.numpy(), np.cumsum(counts)[:-1]) for host in self._hosts]
        ids, positions, places, of, cut, tables = self._sent.split(counts)
        self.rows = Rows(ids, positions, places, of, tables.view(pieces, blocks), cut.view(pieces, 4))
        self.results = torch.zeros(wanted, outputs, device=device)
        self.broken = torch.zeros(rows, dtype=torch.int8, device=device)
        self.uses = 0
        self.replay: Callable[[], None] | None = None

    def fill(self, packed: Packed, scratch: int, pieces: np.ndarray, tables: np.ndarray) -> None:
        """Say what a pass is about; `scratch` is the place of padding, the rest as from `Packed.by_pieces`."""
        given: tuple[Any, ...] = packed.ids, packed.positions, packed.kv_positions, packed.wanted, pieces.ravel()
        turn = self._fills % _IN_FLIGHT  # a copy may not have begun when the next one is made ready
        self._fills += 1
        *parts, pages = self._parts[turn]
        for part, values, rest in zip(parts, given, (0, 0, scratch, 0, 0), strict=True):
            part[: len(values)], part[len(values) :] = values, rest
        blocks = min(self.rows.tables.shape[1], tables.shape[1])
        pages.reshape(self.rows.tables.shape)[: len(tables), :blocks] = tables[:, :blocks]
        self._replaying.send(self._hosts[turn], self._sent)


class CudaDecoder:
    """A whole decoder; it takes over the weights of `model`, whose layers and output layer are released.

    Args:
        model: a transformers decoder that has a description.
        cache: where its keys and values are stored, on the device.
        traits: attention traits of each layer.
        replaying: records passes.
        bits: 8 or 4 to quantize its linear layers; 0 leaves them as they are.
        read: gives the weight of a parameter.

    Attributes:
        kind: class name of the model.
        concurrent: whether several threads may run it at a time; its buffers hold one pass.
        outputs: entries of a row of logits, or of hidden states where there is no output layer.
        broken: a token whose embedding is NaN for now; None for none.
        take: is told what each step of a pass gives, where that is wanted.
    """

    concurrent = False

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        traits: Sequence[AttentionTraits],
        replaying: Replaying,
        bits: int = 0,
        read: Read = held,
    ) -> None:
        self.kind = type(model).__name__
        self.broken: int | None = None
        self.take: Take | None = None
        self._cache, self._replaying = cache, replaying
        self._device = cache.keys[0].device
        self._building = Building(model, cache, traits, bits, read, lambda x: x.to(self._device))
        self.outputs = self._building.outputs
        self._group = self._building.group
        self._statics: dict[Key, _Statics] = {}
        self._runners: dict[tuple[int, int], TritonRunner] = {}

    def run(
        self, packed: Packed, exchange: Exchange | None, broken: list[int] | None, *, scored: bool = False
    ) -> torch.Tensor:
        """A pass.

        Args:
            packed: its rows, on the CPU.
            exchange: brings a state for each row, and takes their hidden states.
            broken: takes the rows whose keys of the last layer are not finite, ascending.
            scored: must be False.

        Returns:
            Logits of the rows that are wanted, float32 [n, vocabulary]; without an output layer, their hidden states.
        """
        assert not scored
        with on(self._device):
            buffers = self._run(packed, exchange)
            if broken is not None:
                broken += buffers.broken[: len(packed.ids)].nonzero()[:, 0].tolist()
            return buffers.results[: len(packed.wanted)].clone()

    def chain(self, passes: Sequence[tuple[Packed, np.ndarray]], choices: Choices | None) -> tuple[Scores, np.ndarray]:
        """Passes one after the other, in which sequences go on with what they choose; the host waits for the last one.

        Args:
            passes: the rows of each and, int64 [n], the sequences that take part in it, ascending, whose wanted rows
                they are. Behind the first, each has one row a sequence, whose token is known by then.
            choices: how the first token of each sequence is chosen, the next ones likewise at the positions behind it;
                None if all take their largest logit.

        Returns:
            Of the rows of all passes, pass by pass: their scores, and whether a key of the last layer is not finite,
            bool.
        """
        with on(self._device):
            return self._chain(passes, choices)

    def _chain(self, passes: Sequence[tuple[Packed, np.ndarray]], choices: Choices | None) -> tuple[Scores, np.ndarray]:
        scores, flags = [], []
        chosen = torch.empty(0)
        for step, (packed, there) in enumerate(passes):
            if step:
                before = passes[step - 1][1]
                same = len(before) == len(there)
                known = chosen if same else chosen[torch.from_numpy(np.searchsorted(before, there)).to(chosen.device)]
                buffers = self._run(packed, None, known)
            else:
                buffers = self._run(packed, None)
            asked = None if choices is None else replace(choices.take(there), position=choices.position[there] + step)
            found = choose_by(buffers.results[: len(there)], asked)
            chosen = found[:, 3].long().clamp_min(0)  # what follows a row that is not finite counts for nothing
            if step % _IN_FLIGHT == _IN_FLIGHT - 1:
                chosen.cpu()  # waits, as the memory that copies are made from is used again
            scores.append(found)
            flags.append(buffers.broken[buffers.rows.wanted[: len(there)]])
        return unpack(torch.cat(scores).cpu()), torch.cat(flags).bool().cpu().numpy()

    def _run(self, packed: Packed, exchange: Exchange | None, tokens: torch.Tensor | None = None) -> _Statics:
        """Run a pass; where its results are. `tokens` are those of its rows, where they are on the device already."""
        if self._building.reach(packed.longest):
            self._runners.clear()
            self._statics.clear()
        rows, wanted = _rung(len(packed.ids)), _rung(len(packed.wanted))
        pieces, tables = packed.by_pieces(max(SHARING // self._group, 1))
        blocks = max(_LEAST_BLOCKS, _above(-(-packed.longest // BLOCK)))
        key = Key(rows, wanted, min(_above(len(pieces)), rows), blocks)
        if key not in self._statics:
            self._statics[key] = _Statics(key, self.outputs, self._device, self._replaying)
        buffers = self._statics[key]
        buffers.fill(packed, self._cache.scratch, pieces, tables)
        if tokens is not None:
            buffers.rows.ids[: len(tokens)] = tokens
        looked_into = exchange is not None or self.take is not None or self.broken is not None
        if looked_into or rows > _MOST_RECORDED:
            self._compute(buffers, exchange, len(packed.ids))
        elif buffers.replay is not None:
            buffers.replay()
        else:
            self._compute(buffers)
            buffers.uses += 1
            if buffers.uses > 1:  # the first pass compiles kernels, and may be the only one of its shape
                buffers.replay = self._replaying.record(lambda: self._compute(buffers))
        return buffers

    def _compute(self, buffers: _Statics, exchange: Exchange | None = None, count: int = 0) -> None:
        """What is recorded: looks at no number, and leaves its results in the buffers.

        An exchange is of `count` rows, those that are no padding.
        """
        building, rows = self._building, buffers.rows
        given = {building.out(False): buffers.results}
        key = (-1, -1) if exchange is None else (exchange.inject, exchange.extract)
        if key not in self._runners:
            self._runners[key] = TritonRunner(building.program(*key))
        if exchange is not None:
            given[building.states] = exchange.states.new_zeros(len(rows.ids), building.width)
            given[building.states][:count] = exchange.states
            if exchange.extract >= 0:
                kept = given[building.extracted] = torch.empty_like(given[building.states])
                exchange.hidden = kept[:count]
        if self.broken is not None:
            rows = rows._replace(ids=rows.ids.masked_fill(rows.ids == self.broken, NOT_A_NUMBER))
        buffers.broken.copy_(self._runners[key].run(rows, given, self.take))


def _rung(rows: int) -> int:
    """The least rung of the ladder that holds `rows`."""
    return next((rung for rung in _LADDER if rung >= rows), rows)


def _above(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()
