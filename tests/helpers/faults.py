"""The engine broken on purpose, in one way each: a fault is a function that breaks it by monkeypatching.

As a program, `python faults.py FAULT ARGUMENTS...` is `detgen ARGUMENTS...` with that fault, also in the processes that
it starts: workers import the main module again, and the runs that the check kills and resumes are started through it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detgen.check import resuming
from detgen.engine import committing, engine, verification
from detgen.engine.records import NONE
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stopping import Stopping
from detgen.kernels.attention import PERIOD, Attend, AttentionTraits, attend_blocks
from detgen.kernels.linear import PrepackedLinear
from detgen.kernels.penalties import Adjuster
from detgen.kernels.sampling import Choices
from detgen.outputs.journal import Journal
from detgen.passes import kv_cache, loading, pages, preparing
from detgen.passes.forward import Forward
from detgen.passes.kv_cache import KVCache
from detgen.passes.native_decoder import NativeDecoder
from detgen.passes.packing import FREE_SHAPES, Packed, Shapes, Window, Windows
from detgen.passes.pages import PAGE, Pages, Prefix

Patch = pytest.MonkeyPatch


def padding_row_leaks(patch: Patch) -> None:
    """Padding rows write their entries over a position in the first slot's first page."""
    patch.setattr(Shapes, "fit_rows", lambda self, rows: -(-rows // 8) * 8)
    patch.setattr(KVCache, "scratch", property(lambda self: int(self.pages.tables[0, 0]) * PAGE + 2))


def provisional_entry_stays(patch: Patch) -> None:
    """The canonical pass leaves the entries of drafted tokens as the drafting left them."""
    _keep_old(patch, lambda w, written: range(w.start + 1, w.start + len(w.tokens)) if w.logits > 1 else range(0))


def draft_entry_reused_after_roll_back(patch: Patch) -> None:
    """The entry that a rejected token wrote is taken for that of the token committed in its place."""
    _keep_old(patch, lambda w, written: range(w.start, w.start + (w.start in written.get(w.slot, ()))))


def _keep_old(patch: Patch, kept: Callable[[Window, dict[int, range]], range]) -> None:
    """Keep what some positions of a window hold, given those that the last pass with drafts wrote, by slot."""
    run = Forward.run
    written: dict[int, range] = {}

    def faulty(self: Forward, windows: Windows, shapes: Shapes, broken: list[int] | None = None, **scored: bool) -> Any:
        if shapes is FREE_SHAPES:  # the draft model
            return run(self, windows, shapes, broken, **scored)
        tables = self.cache.pages.tables
        places = [(w.slot, p) for w in windows for p in kept(w, written)]
        buffer = torch.tensor([tables[slot, p // PAGE] * PAGE + p % PAGE for slot, p in places], dtype=torch.int64)
        layers = range(len(self.cache.keys))
        before = [[entries.clone() for entries in self.cache.read(layer, buffer)] for layer in layers]
        logits = run(self, windows, shapes, broken, **scored)
        for layer in layers:
            self.cache.write(layer, buffer, *before[layer])
        written.clear()
        written.update((w.slot, range(w.start, w.start + len(w.tokens))) for w in windows if w.logits > 1)
        return logits

    patch.setattr(Forward, "run", faulty)


def truncation_off_by_one(patch: Patch) -> None:
    """One position more than was computed counts as cached."""
    advance = Scheduler.advance

    def faulty(self: Scheduler, slots: np.ndarray, cached: np.ndarray) -> None:
        generated = self.live.length[slots] > self.live.prompt[slots]
        advance(self, slots, np.minimum(cached + generated, self._pages.held[slots] * PAGE))

    patch.setattr(Scheduler, "advance", faulty)


def chain_skips_an_entry(patch: Patch) -> None:
    """The second pass of a chain leaves its position of the cache as it is."""
    verify = committing.Committing.verify

    def faulty(self: committing.Committing, ran: committing.Ran) -> committing.Verified | None:
        if ran.chained:
            tables = self._cache.pages.tables
            places = [(w.slot, w.start + 1) for w in ran.windows if len(w.tokens) > 1]
            skipped = torch.tensor([tables[slot, p // PAGE] * PAGE + p % PAGE for slot, p in places], dtype=torch.int64)
            for layer in range(len(self._cache.keys)):
                self._cache.write(layer, skipped, *(0 * x for x in self._cache.read(layer, skipped)))
        return verify(self, ran)

    patch.setattr(committing.Committing, "verify", faulty)


def noise_keyed_by_slot(patch: Patch) -> None:
    """The sampling noise depends on the place in the batch."""
    choices = committing.Committing.choices

    def faulty(self: committing.Committing, rows: committing.Rows) -> Choices:
        found = choices(self, rows)
        return replace(found, seed=found.seed + rows.slots[rows.owner].astype(np.uint64))

    patch.setattr(committing.Committing, "choices", faulty)


def penalty_for_rolled_back_drafts(patch: Patch) -> None:
    """Tokens that were drafted and rolled back stay among those that occurred."""
    patch.setattr(Adjuster, "_forget", lambda self: self._counted.pop())


def penalty_of_the_window_before(patch: Patch) -> None:
    """All rows of a window are adjusted by the committed tokens alone."""
    adjustment = Sequence.adjustment
    patch.setattr(Sequence, "adjustment", lambda self, ahead=0, draft=(): adjustment(self))


_TILE_ROWS = 4  # query rows of the smallest tile


def attend_by(patch: Patch, attend: Attend) -> None:
    """Let a function be the attention of tiles, whatever the probe chose."""

    def attended(
        self: Packed, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        if self._tiles is None:
            self._shapes = replace(self._shapes, tile_rows=_TILE_ROWS, key_lengths=(PERIOD,))
            self._tiles = self.tiles()
        return self._tiles.attend(q, keys, values, attend, traits)

    patch.setattr(Packed, "attend", attended)


def _attend(patch: Patch, faulty: Callable[..., torch.Tensor]) -> None:
    """Let a function that is given an attention and its arguments stand for it."""
    attend_by(patch, partial(faulty, attend_blocks))


def tile_of_one_row(patch: Patch) -> None:
    """The smallest tiles are computed by another kernel, here one that adds up in float64."""

    def faulty(
        sound: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        if q.shape[2] > _TILE_ROWS:
            return sound(q, k, v, mask, traits)
        scores = (q.double() * traits.scale) @ k.double().permute(0, 2, 3, 1) + mask
        return (torch.softmax(scores, -1) @ v.double().transpose(1, 2)).to(q.dtype)

    _attend(patch, faulty)


def key_blocks_relative_to_window(patch: Patch) -> None:
    """Keys are summed from the window's own beginning on, and round."""

    def faulty(
        sound: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        first = int((mask == 0).sum(-1).min()) if mask.numel() else 0
        return sound(q, k.roll(-first, 1), v.roll(-first, 1), mask.roll(-first, 3), traits)

    _attend(patch, faulty)


def softmax_unpadded(patch: Patch) -> None:
    """A tile's keys end with its longest row instead of a whole block."""

    def faulty(
        sound: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: AttentionTraits
    ) -> torch.Tensor:
        end = int((mask == 0).sum(-1).max())
        weights = torch.softmax((q @ k[:, :end].permute(0, 2, 3, 1)) * traits.scale + mask[..., :end], -1)
        return weights @ v[:, :end].transpose(1, 2)

    _attend(patch, faulty)


def stop_string_cut_by_window(patch: Patch) -> None:
    """Stop strings are looked for at the first token of a window only."""
    stopped = Stopping._stopped
    patch.setattr(Stopping, "_stopped", lambda self, seq, pending: len(pending) == 1 and stopped(self, seq, pending))


def draft_taken_unchecked(patch: Patch) -> None:
    """The first drafted token is accepted whatever the model says."""

    def faulty(firsts: np.ndarray, drafted: np.ndarray, chosen: np.ndarray, ends: np.ndarray) -> verification.Verdicts:
        there = firsts[drafted[firsts] != NONE]
        chosen[there] = drafted[there]
        return verification.judge(firsts, drafted, chosen, ends)

    patch.setattr(committing, "judge", faulty)


def _changed_steps(patch: Patch, change: Callable[[NativeDecoder, Packed, str, torch.Tensor], None]) -> None:
    """Let a function change what the steps of a native decoder give, told the pass and the step's name."""
    run = NativeDecoder.run

    def faulty(self: NativeDecoder, packed: Packed, *args: Any, **scored: bool) -> torch.Tensor:
        watching = self.take

        def take(name: str, out: torch.Tensor) -> None:
            change(self, packed, name, out)
            if watching is not None:
                watching(name, out)

        self.take = take
        try:
            return run(self, packed, *args, **scored)
        finally:
            self.take = watching

    patch.setattr(NativeDecoder, "run", faulty)


def few_rows_by_another_kernel(patch: Patch) -> None:
    """Linear layers of one row round otherwise than those of more."""

    def change(decoder: NativeDecoder, packed: Packed, name: str, out: torch.Tensor) -> None:
        if name.endswith("_proj") and len(out) == 1:
            out.copy_((out.double() * (1 + 1e-7)).to(out.dtype))

    _changed_steps(patch, change)
    forward = PrepackedLinear.forward

    def faulty(self: PrepackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return (out.double() * (1 + 1e-7)).to(out.dtype) if x.shape[-2] == 1 else out

    patch.setattr(PrepackedLinear, "forward", faulty)


def prefix_copied_short(patch: Patch) -> None:
    """One position too few is copied from the page that holds a prompt's beginning."""
    copy = KVCache.copy
    patch.setattr(KVCache, "copy", lambda self, source, target, positions: copy(self, source, target, positions - 1))


def page_freed_too_early(patch: Patch) -> None:
    """A page is given back although another sequence still has it."""
    truncate = Pages.truncate

    def faulty(self: Pages, slot: int, blocks: int) -> None:
        held = self.tables[slot, blocks : int(self.held[slot])].tolist()
        shared = [page for page in held if self.references[page] > 1 and page not in self._empty]
        truncate(self, slot, blocks)
        self._empty += shared

    patch.setattr(Pages, "truncate", faulty)


def shared_page_written(patch: Patch) -> None:
    """A page of which only the first positions are shared is used as it is, and written behind them."""
    take = Pages.take

    def faulty(self: Pages, slot: int, blocks: int, prefix: Prefix | None = None, *more: Any) -> None:
        copied = take(self, slot, blocks, prefix, *more)
        if copied is not None:
            source, own, _ = copied
            self.tables[slot, self.tables[slot].tolist().index(own)] = source
            self.references[[source, own]] += 1, -1
            self._retained.pop(source, None)
            self._empty.append(own)

    patch.setattr(Pages, "take", faulty)


def key_without_a_token(patch: Patch) -> None:
    """Blocks that differ in their last token alone have the same key."""
    key = pages._key
    patch.setattr(pages, "_key", lambda before, data: key(before, data[: 8 * (PAGE - 1)]))


def replay_loses_a_token(patch: Patch) -> None:
    """A sequence that gave its pages back is read again but for one token."""
    place = Scheduler._place

    def faulty(self: Scheduler, seq: Sequence, prefix: Prefix) -> None:
        place(self, seq, prefix)
        if seq.generated:
            self.live.cached[seq.slot] = min(prefix.shared + 1, len(seq.tokens) - 1)

    patch.setattr(Scheduler, "_place", faulty)


def resume_loses_a_token(patch: Patch) -> None:
    """A sample that comes from the journal is written without its last token."""
    read = Journal.read

    def faulty(self: Journal, offset: int) -> Any:
        entry = read(self, offset)
        line = json.loads(entry.output)
        line["token_ids"] = line["token_ids"][:-1]
        return replace(entry, output=json.dumps(line).encode() + b"\n")

    patch.setattr(Journal, "read", faulty)


def outlier_columns_of_the_pass(patch: Patch) -> None:
    """LLM.int8() computes a column in another precision as soon as any row of the pass makes it an outlier."""
    from bitsandbytes.nn import Linear8bitLt  # not before detgen has hushed it

    forward = Linear8bitLt.forward

    def faulty(self: Linear8bitLt, x: torch.Tensor) -> Any:
        self.state.threshold = 4.0
        return forward(self, x)

    patch.setattr(Linear8bitLt, "forward", faulty)


def broken_entry_stays(patch: Patch) -> None:
    """Entries that are not finite are stored as they are."""

    def change(decoder: NativeDecoder, packed: Packed, name: str, out: torch.Tensor) -> None:
        if name.endswith("rotated"):
            layer, at = int(name.split(".")[1].split(",")[0]), packed.kv_positions
            keys, values = decoder.cache.keys[layer], decoder.cache.values[layer]
            heads, size = values.shape[1:]
            k, v = out[:, -2 * heads * size :].view(len(out), 2, heads, size).unbind(1)
            keys[at // PAGE, :, :, at % PAGE] = k
            values[at] = v

    _changed_steps(patch, change)
    patch.setattr(kv_cache, "bounded", lambda x: x)


def broken_draft_ends_request(patch: Patch) -> None:
    """A drafted token whose row is not finite ends the request, though it is not committed."""
    sound = committing.Committing._sound

    def faulty(self: committing.Committing, rows: Any, chosen: np.ndarray, committed: np.ndarray) -> np.ndarray:
        found = sound(self, rows, chosen, committed)
        for i in np.flatnonzero((np.minimum.reduceat(chosen, rows.firsts) < 0) & (found > 0)).tolist():
            seq = self._scheduler.live[int(rows.slots[i])]
            seq.break_off(int(rows.positions[i]))
            self._end(seq)
            found[i] = 0
        return found

    patch.setattr(committing.Committing, "_sound", faulty)


FAULTS: dict[str, Callable[[Patch], None]] = {
    f.__name__: f
    for f in (
        padding_row_leaks,
        provisional_entry_stays,
        draft_entry_reused_after_roll_back,
        truncation_off_by_one,
        chain_skips_an_entry,
        noise_keyed_by_slot,
        penalty_for_rolled_back_drafts,
        penalty_of_the_window_before,
        tile_of_one_row,
        key_blocks_relative_to_window,
        softmax_unpadded,
        stop_string_cut_by_window,
        draft_taken_unchecked,
        few_rows_by_another_kernel,
        prefix_copied_short,
        page_freed_too_early,
        shared_page_written,
        key_without_a_token,
        replay_loses_a_token,
        resume_loses_a_token,
        outlier_columns_of_the_pass,
        broken_entry_stays,
        broken_draft_ends_request,
    )
}

# Of passes by torch's operators, which models have that no native decoder knows.
BY_TORCH = {
    padding_row_leaks.__name__,
    tile_of_one_row.__name__,
    key_blocks_relative_to_window.__name__,
    softmax_unpadded.__name__,
}

# Found by few settings, which the quick check may try after its first minute: those of other models, the killed run.
LATE = {outlier_columns_of_the_pass.__name__, resume_loses_a_token.__name__}


def break_engines(fault: Callable[[Patch], None]) -> None:
    """Break every engine of this process once it is ready: its probe would refuse or avoid what it can see."""
    faulty = Patch()
    prepare = engine.prepare
    if fault.__name__ in BY_TORCH:
        loading.is_native = preparing.is_native = lambda _: False
        loading.runs_natively = preparing.runs_natively = lambda _: False

    def prepare_sound(*args: Any, **named: Any) -> Any:
        faulty.undo()
        try:
            return prepare(*args, **named)
        finally:  # also where a model cannot be loaded in another quantization
            fault(faulty)

    engine.prepare = prepare_sound


if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from helpers.thinking_faults import THINKING_FAULTS

    break_engines({**FAULTS, **THINKING_FAULTS}[sys.argv[1]])
    resuming.DETGEN = (sys.executable, __file__, sys.argv[1])

if __name__ == "__main__":
    from detgen.cli import app

    app(sys.argv[2:], prog_name="detgen")
