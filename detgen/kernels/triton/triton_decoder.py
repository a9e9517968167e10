"""A decoder on CUDA: programs of steps, run by kernels in Triton, and recorded for each rung of the row counts.

It has the bits of the decoder on a CPU. All inputs of a pass reach the device in one copy, into buffers that stay in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from detgen.kernels.attention import BLOCK, SHARING
from detgen.kernels.decoder import KVBuffers
from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import Ends, InputBatch
from detgen.kernels.logprobs import Scores
from detgen.kernels.program_decoder import FewerBits, ProgramDecoder, Programs
from detgen.kernels.rounds import Pass, Passes, Round, Rounds, told
from detgen.kernels.sampling import Choices
from detgen.kernels.triton.drafted_rounds import Sheet
from detgen.kernels.triton.growing_lists import GrowingLists
from detgen.kernels.triton.launching import fetched, on, sent, versions
from detgen.kernels.triton.replaying import Replaying
from detgen.kernels.triton.runner import TritonRunner
from detgen.kernels.triton.sampling_kernels import choose_by, unpack
from detgen.kernels.triton.shapes import Key, Memory, Shape
from detgen.program.operands import ARITHMETIC
from detgen.program.rows import Rows

_MOST_RECORDED = 512  # rows of a pass; in larger ones, launching takes less time than the kernels
_MOST_SHAPES = 64  # of recorded passes: those used last


class TritonDecoder(ProgramDecoder):
    """A model whose passes are launched on a device.

    Args:
        programs: of the model, with tensors on the device.
        scratch: position in the KV cache that padding rows write to.
        device: where it runs.
        replaying: records passes.
        fewer: see `ProgramDecoder`.

    Attributes:
        concurrent: see `Decoder`; a decoder's buffers hold one pass.
        kept: see `Chaining`.
        stops: see `Chaining`.
        reads: see `Chaining`.
    """

    concurrent = stops = False
    reads = True
    kept = 0

    def __init__(
        self,
        programs: Programs,
        scratch: int,
        device: torch.device,
        replaying: Replaying,
        fewer: FewerBits | None = None,
    ) -> None:
        super().__init__(programs, fewer)
        self._scratch, self._device, self._replaying = scratch, device, replaying
        self._shapes: dict[Key, Shape] = {}
        self._memory = Memory(self.outputs, device)
        self._runners: dict[tuple[int, int], TritonRunner] = {}
        self._sharing = max(SHARING // programs.group, 1)  # most tokens of a piece

    def over(self, cache: KVBuffers) -> TritonDecoder:
        """See `Decoder`."""
        scratch = (len(cache.keys[0]) - 1) * BLOCK
        return TritonDecoder(self._programs.over(cache), scratch, self._device, self._replaying)

    @property
    def chaining(self) -> TritonDecoder:
        """See `Decoder`."""
        return self

    @property
    def rounding(self) -> TritonDecoder:
        """See `Decoder`."""
        return self

    def run(
        self,
        batch: InputBatch,
        exchange: Exchange | None = None,
        broken: list[int] | None = None,
        *,
        scored: bool = False,
        choices: Callable[[], Choices] | None = None,
    ) -> torch.Tensor | Scores:
        """See `Decoder`; waits for the device once, even if tokens are chosen."""
        with torch.inference_mode(), on(self._device):
            buffers = self._run(batch, exchange)
            logits, chosen = buffers.results[: batch.count], []
            if batch.count and (scored or choices is not None):
                how = None if choices is None else choices()
                chosen = [choose_by(logits, how, 0 if how is None else how.most)]
            results = logits if chosen else logits.clone()
            scores, found, _ = _fetch(chosen, [buffers.broken[: len(batch.ids)]])
            if broken is not None:
                broken += found.nonzero()[0].tolist()
            return scores if chosen else results

    def chain(self, batch: InputBatch, lengths: np.ndarray, ends: Ends | None) -> tuple[Scores, list[int]]:
        """See `Chaining`; ends are known only after the last pass."""
        return self._launch(batch, lengths, None, ends)

    def sample(
        self, batch: InputBatch, lengths: np.ndarray, choices: Choices, ends: Ends | None
    ) -> tuple[np.ndarray, Scores, list[int]]:
        """See `Chaining`."""
        scores, broken = self._launch(batch, lengths, choices, ends)
        return scores.tokens, scores, broken

    def draft(self, batch: InputBatch, lengths: np.ndarray, choices: Choices) -> list[list[int]]:
        """See `Chaining`."""
        scores, _ = self._launch(batch, lengths, choices, None)
        return [of[of >= 0].tolist() for of in np.split(scores.tokens, lengths.cumsum()[:-1])]

    def _again(self, fewer: FewerBits) -> TritonDecoder:
        return TritonDecoder(self._programs, self._scratch, self._device, self._replaying, fewer)

    def profile(self) -> dict[str, Any]:
        """See `Decoder`: the bytes of the other decoders, though no GPU has shown it yet."""
        capability = "{}.{}".format(*torch.cuda.get_device_capability(self._device))
        return {
            "arithmetic": ARITHMETIC,
            "device": torch.cuda.get_device_name(self._device),
            "cuda": {"capability": capability, "toolkit": torch.version.cuda, **versions()},
        }

    @torch.inference_mode()
    def _launch(
        self, batch: InputBatch, lengths: np.ndarray, choices: Choices | None, ends: Ends | None
    ) -> tuple[Scores, list[int]]:
        """Launch consecutive passes, in which sequences continue with their choices; the host waits for the last one.

        Args:
            batch: as for `Chaining`, like `lengths` and `ends`.
            lengths: as for `Chaining`.
            choices: how the first token of each sequence is chosen; later ones are chosen alike at the positions that
                follow. None if all take their largest logit.
            ends: where sequences end.
        """
        begins = batch.choosing[1]
        steps = max(1 + len(batch.later), int((begins + lengths).max(initial=0)))
        theres = [np.flatnonzero((begins <= step) & (step < begins + lengths)) for step in range(steps)]
        with on(self._device):
            scores, others = self._chain(batch, theres, choices)
        owner = np.concatenate(theres)
        depth = np.repeat(np.arange(steps), list(map(len, theres))) - begins[owner]
        over = ~scores.finite
        if ends is not None:
            over |= np.isin(scores.tokens, ends.tokens) & ends.to_end[owner]
        np.minimum.at(lengths, owner[over], depth[over] + 1)
        order = np.lexsort((depth, owner))
        return scores.only(order[(depth < lengths[owner])[order]]), np.flatnonzero(others).tolist()

    def _chain(
        self, batch: InputBatch, theres: Sequence[np.ndarray], choices: Choices | None
    ) -> tuple[Scores, np.ndarray]:
        """Return the scores of the rows that choose, pass by pass, and whether the other rows are broken, bool.

        `theres` are the sequences that choose in each pass, int64 [n], ascending, so that those that begin there come
        last. A pass is packed while the one before it runs.
        """
        begins, most, grown = batch.choosing[1], 0 if choices is None else choices.most, None
        if choices is not None and choices.growing is not None:
            passes_of = np.bincount(np.concatenate(theres), minlength=len(choices))
            grown = GrowingLists.of(choices.growing, passes_of, self._device)
        passes, found, flags = [batch], [], []
        chosen = torch.empty(0, dtype=torch.int64, device=self._device)
        for step, there in enumerate(theres):
            if step:
                before, goes = theres[step - 1], there[begins[there] < step]
                if len(before) != len(goes):
                    chosen = chosen[sent(torch.from_numpy(np.searchsorted(before, goes)), chosen.device)]
                passes.append(batch.after(step, goes))
            buffers = self._run(passes[-1], None, partial(_fill_in, chosen))
            if len(there):
                how, depth = None, step - begins[there]
                if choices is not None:
                    how = replace(choices.take(there), position=choices.position[there] + depth.astype(np.uint64))
                lists = None if grown is None else grown.after(there, depth, chosen)
                packed = choose_by(buffers.results[: len(there)], how, most, lists)
                chosen = packed[:, 3].long().clamp_min(0)  # the passes after a row that is not finite are ignored
                found.append(packed)
            flags.append(buffers.broken[: len(passes[-1].ids)].clone())
        scores, broken, _ = _fetch(found, flags)
        asked = np.concatenate([np.isin(np.arange(len(of.ids)), of.wanted[: of.count]) for of in passes])
        return scores._replace(finite=scores.finite & ~broken[asked]), broken[~asked]

    @torch.inference_mode()
    def rounds(self, drafting: TritonDecoder, asked: Rounds, passes: Passes) -> list[Round]:
        """See `Rounding`."""
        sheet = Sheet(asked, self._device)
        sheets, found, flags = [], [], []
        most = 0 if asked.choices is None else asked.choices.most
        with on(self._device):
            for turn, (drafts, verifies) in enumerate(zip(passes.drafting, passes.verifying, strict=True)):
                if asked.texts is not None:
                    sheet.look_up()
                for one in drafts:
                    placed = sheet if turn or one.step else None
                    buffers = drafting._placed(one, placed, asked.longest)
                    how, lists, positions = sheet.choices(one)
                    sheet.note(one, choose_by(buffers.results[: one.batch.count], how, 0, lists, positions))
                sheets.append(sheet.copy())
                for one in verifies:
                    buffers = self._placed(one, sheet, asked.longest)
                    flags.append(buffers.broken[: len(one.batch.ids)].clone())
                    if one.batch.count:
                        how, lists, positions = sheet.choices(one)
                        found.append(choose_by(buffers.results[: one.batch.count], how, most, lists, positions))
                    if len(one.which):
                        sheet.judge(one, found[-1], flags[-1])
            scores, broken, known = _fetch(found, flags, sheets)
        return told(asked, passes, known, scores, broken)

    def _placed(self, one: Pass, sheet: Sheet | None, longest: int) -> Shape:
        """Run a pass of a round, of the rows that a sheet tells, if any; return its buffers."""
        if sheet is None or not len(one.which):
            return self._run(one.batch, None)
        return self._run(one.batch, None, lambda rows: sheet.place(one, rows, self._scratch, self._sharing), longest)

    def _run(
        self,
        packed: InputBatch,
        exchange: Exchange | None,
        place: Callable[[Rows], object] | None = None,
        longest: int = 0,
    ) -> Shape:
        """Run a pass; return its buffers.

        Args:
            packed: its rows.
            exchange: as for `run`.
            place: fills in what the device alone knows of the rows.
            longest: number of positions of the longest context that these may have then.
        """
        longest = max(longest, packed.longest)
        if self._outgrown(longest):
            self._runners.clear()
            self._shapes.clear()
        pieces, tables = packed.by_pieces(self._sharing)
        key, blocks = Key.of(packed, len(pieces)), -(-longest // BLOCK)
        if self._memory.reach(key, blocks):
            self._shapes.clear()
        buffers = self._shapes.pop(key) if key in self._shapes else Shape(key, self._memory)
        self._shapes[key] = buffers  # last in the order of use
        if len(self._shapes) > _MOST_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        buffers.fill(packed, self._scratch, pieces, tables, blocks)
        if place is not None:
            place(buffers.rows)
        looked_into = exchange is not None or self._take is not None or self._broken is not None or self._exact
        if looked_into or key.rows > _MOST_RECORDED:
            self._compute(buffers, exchange)
        elif buffers.replay is not None:
            buffers.replay()
        elif buffers.used:
            buffers.replay = self._replaying.record(lambda: self._compute(buffers))
        else:  # the first pass compiles kernels, and may be the only one of its shape
            self._compute(buffers)
            buffers.used = True
        return buffers

    def _compute(self, buffers: Shape, exchange: Exchange | None = None) -> None:
        """Compute the part that is recorded: it reads no number, and leaves its results in the buffers."""
        programs = self._programs
        key = (-1, -1) if exchange is None else (exchange.inject, exchange.extract)
        if key not in self._runners:
            self._runners[key] = TritonRunner(self.program(*key))
        given = self._exchanged(exchange, len(buffers.rows.ids))
        given[programs.out(False)] = buffers.results
        buffers.broken.copy_(
            self._runners[key].run(self._with_broken(buffers.rows), given, self._take, exact=self._exact)
        )


def _fill_in(tokens: torch.Tensor, rows: Rows) -> None:
    """Let the first rows of a pass read these tokens."""
    rows.ids[: len(tokens)] = tokens


def _fetch(
    chosen: Sequence[torch.Tensor], broken: Sequence[torch.Tensor], sheets: Sequence[torch.Tensor] = ()
) -> tuple[Scores, np.ndarray, np.ndarray]:
    """Fetch, in one copy, the choices of passes, as from `choose_by`, which of their rows are broken, bool, and sheets.

    Sheets are int64 [sheets, rows, columns] then; their numbers fit 32 bits.
    """
    width = chosen[0].shape[1] if chosen else 4
    parts = [*(x.flatten() for x in chosen), *(x.flatten().int() for x in (*broken, *sheets))]
    packed, flags, known = np.split(
        fetched(torch.cat(parts)).numpy(), np.cumsum([width * sum(map(len, chosen)), sum(map(len, broken))])
    )
    scores = unpack(torch.from_numpy(packed.reshape(-1, width)))
    return scores, flags > 0, known.astype(np.int64).reshape(len(sheets), *(sheets[0].shape if sheets else (0,)))
