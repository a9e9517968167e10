"""The engine broken on purpose, in one way each: a fault is a function that breaks it by monkeypatching.

As a program, `python faults.py FAULT ARGUMENTS...` is `detgen ARGUMENTS...` with that fault, also in the processes that
it starts: workers import the main module again, and the runs that the check kills and resumes are started through it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detgen.engine import engine, output_processing, verification
from detgen.engine.decoding import Decoding
from detgen.engine.output_processing import OutputProcessor
from detgen.engine.pass_results import Ran, Verified, WantedRows
from detgen.engine.records import NONE
from detgen.engine.request import Request
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stopping import Stopping
from detgen.kernels.c.c_decoder import CDecoder
from detgen.kernels.input_batch import InputBatch, Window, Windows
from detgen.kernels.penalties import Adjuster
from detgen.kernels.sampling import Choices
from detgen.outputs import samples
from detgen.program.operands import Cache
from detgen.program.steps import Rotate
from detgen.runner import block_manager, kv_cache
from detgen.runner.block_manager import PAGE, BlockManager, Prefix
from detgen.runner.kv_cache import KVCache
from detgen.runner.model_runner import ModelRunner
from detgen.verify.perturb import resuming

Patch = pytest.MonkeyPatch


def provisional_entry_stays(patch: Patch) -> None:
    """The canonical pass leaves the entries of drafted tokens as the drafting left them."""
    _keep_old(patch, lambda w, written: range(w.start + 1, w.start + len(w.tokens)) if w.logits > 1 else range(0))


def draft_entry_reused_after_roll_back(patch: Patch) -> None:
    """The entry that a rejected token wrote is taken for that of the token committed in its place."""
    _keep_old(patch, lambda w, written: range(w.start, w.start + (w.start in written.get(w.slot, ()))))


def _keep_old(patch: Patch, kept: Callable[[Window, dict[int, range]], range]) -> None:
    """Keep what some positions of a window hold, given those that the last pass with drafts wrote, by slot."""
    run, step = ModelRunner.run, Decoding.step
    written: dict[int, range] = {}
    target: list[ModelRunner] = []  # the passes of the draft model are others

    def verifying(self: Decoding) -> list[Sequence]:
        target.append(self._target)
        try:
            return step(self)
        finally:
            target.pop()

    def faulty(self: ModelRunner, windows: Windows, broken: list[int] | None = None, **scored: bool) -> Any:
        if self not in target:
            return run(self, windows, broken, **scored)
        tables = self.cache.pages.tables
        places = [(w.slot, p) for w in windows for p in kept(w, written)]
        buffer = np.array([tables[slot, p // PAGE] * PAGE + p % PAGE for slot, p in places], np.int64)
        layers = range(len(self.cache.keys))
        before = [[entries.copy() for entries in self.cache.read(layer, buffer)] for layer in layers]
        logits = run(self, windows, broken, **scored)
        for layer in layers:
            self.cache.write(layer, buffer, *before[layer])
        written.clear()
        written.update((w.slot, range(w.start, w.start + len(w.tokens))) for w in windows if w.logits > 1)
        return logits

    patch.setattr(ModelRunner, "run", faulty)
    patch.setattr(Decoding, "step", verifying)


def truncation_off_by_one(patch: Patch) -> None:
    """One position more than was computed counts as cached."""
    advance = Scheduler.advance

    def faulty(self: Scheduler, slots: np.ndarray, cached: np.ndarray) -> None:
        generated = self.live.length[slots] > self.live.prompt[slots]
        advance(self, slots, np.minimum(cached + generated, self._pages.held[slots] * PAGE))

    patch.setattr(Scheduler, "advance", faulty)


def chain_skips_an_entry(patch: Patch) -> None:
    """The second pass of a chain leaves its position of the cache as it is."""
    verify = OutputProcessor.verify

    def faulty(self: OutputProcessor, ran: Ran) -> Verified | None:
        if ran.chained:
            tables = self._cache.pages.tables
            places = [(w.slot, w.start + 1) for w in ran.windows if len(w.tokens) > 1]
            skipped = np.array([tables[slot, p // PAGE] * PAGE + p % PAGE for slot, p in places], np.int64)
            for layer in range(len(self._cache.keys)):
                self._cache.write(layer, skipped, *(0 * x for x in self._cache.read(layer, skipped)))
        return verify(self, ran)

    patch.setattr(OutputProcessor, "verify", faulty)


def noise_keyed_by_slot(patch: Patch) -> None:
    """The sampling noise depends on the place in the batch."""
    choices = OutputProcessor.choices

    def faulty(self: OutputProcessor, rows: WantedRows) -> Choices:
        found = choices(self, rows)
        return replace(found, seed=found.seed + rows.slots[rows.owner].astype(np.uint64))

    patch.setattr(OutputProcessor, "choices", faulty)


def penalty_for_rolled_back_drafts(patch: Patch) -> None:
    """Tokens that were drafted and rolled back stay among those that occurred."""
    patch.setattr(Adjuster, "_forget", lambda self: self._counted.pop())


def penalty_of_the_window_before(patch: Patch) -> None:
    """All rows of a window are adjusted by the committed tokens alone."""
    adjustment = Sequence.adjustment
    patch.setattr(Sequence, "adjustment", lambda self, ahead=0, draft=(): adjustment(self))


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

    patch.setattr(output_processing, "judge", faulty)


def _changed_steps(patch: Patch, change: Callable[[CDecoder, InputBatch, str, np.ndarray], None]) -> None:
    """Let a function change what the steps of a native decoder give, told the pass and the step's name."""
    run = CDecoder.run

    def faulty(self: CDecoder, packed: InputBatch, *args: Any, **scored: bool) -> np.ndarray:
        watching = self._take

        def take(name: str, out: np.ndarray) -> None:
            change(self, packed, name, out)
            if watching is not None:
                watching(name, out)

        self._take = take
        try:
            return run(self, packed, *args, **scored)
        finally:
            self._take = watching

    patch.setattr(CDecoder, "run", faulty)


def few_rows_by_another_kernel(patch: Patch) -> None:
    """Linear layers of one row round otherwise than those of more."""

    def change(decoder: CDecoder, packed: InputBatch, name: str, out: np.ndarray) -> None:
        if name.endswith("_proj") and len(out) == 1:
            out[...] = out.astype(np.float64) * (1 + 1e-7)

    _changed_steps(patch, change)


def longest_context_rounds(patch: Patch) -> None:
    """The attention of a row rounds otherwise beside a row that sees more blocks of keys."""

    def change(decoder: CDecoder, packed: InputBatch, name: str, out: np.ndarray) -> None:
        if name.endswith("self_attn"):
            blocks = packed.positions // PAGE
            shorter = blocks < blocks.max()
            out[shorter] = out[shorter].astype(np.float64) * (1 + 1e-6)

    _changed_steps(patch, change)


def prefix_copied_short(patch: Patch) -> None:
    """One position too few is copied from the page that holds a prompt's beginning."""
    copy = KVCache.copy
    patch.setattr(KVCache, "copy", lambda self, source, target, positions: copy(self, source, target, positions - 1))


def page_freed_too_early(patch: Patch) -> None:
    """A page is given back although another sequence still has it."""
    truncate = BlockManager.truncate

    def faulty(self: BlockManager, slot: int, blocks: int) -> None:
        held = self.tables[slot, blocks : int(self.held[slot])].tolist()
        shared = [page for page in held if self.references[page] > 1 and page not in self._empty]
        truncate(self, slot, blocks)
        self._empty += shared

    patch.setattr(BlockManager, "truncate", faulty)


def shared_page_written(patch: Patch) -> None:
    """A page of which only the first positions are shared is used as it is, and written behind them."""
    take = BlockManager.take

    def faulty(self: BlockManager, slot: int, blocks: int, prefix: Prefix | None = None, *more: Any) -> None:
        copied = take(self, slot, blocks, prefix, *more)
        if copied is not None:
            source, own, _ = copied
            self.tables[slot, self.tables[slot].tolist().index(own)] = source
            self.references[[source, own]] += 1, -1
            self._retained.pop(source, None)
            self._empty.append(own)

    patch.setattr(BlockManager, "take", faulty)


def key_without_a_token(patch: Patch) -> None:
    """Blocks that differ in their last token alone have the same key."""
    key = block_manager._key
    patch.setattr(block_manager, "_key", lambda before, data: key(before, data[: 8 * (PAGE - 1)]))


def replay_loses_a_token(patch: Patch) -> None:
    """A sequence that gave its pages back is read again but for one token."""
    place = Scheduler._place

    def faulty(self: Scheduler, seq: Sequence, prefix: Prefix) -> None:
        place(self, seq, prefix)
        if seq.generated:
            self.live.cached[seq.slot] = min(prefix.shared + 1, len(seq.tokens) - 1)

    patch.setattr(Scheduler, "_place", faulty)


def resume_loses_a_token(patch: Patch) -> None:
    """A sample that comes from the store is written without its last token."""
    read = samples.unpacked

    def faulty(data: bytes, request: Request, sample: int) -> Any:
        found = read(data, request, sample)
        return found and replace(found, token_ids=found.token_ids[:-1])

    patch.setattr(samples, "unpacked", faulty)


@functools.cache
def _kept_by(decoder: CDecoder) -> dict[str, Cache]:
    """Where the steps of a decoder store keys and values."""
    return {step.name: step.cache for step in decoder.program().steps if isinstance(step, Rotate)}


def broken_entry_stays(patch: Patch) -> None:
    """Entries that are not finite are stored as they are."""

    def change(decoder: CDecoder, packed: InputBatch, name: str, out: np.ndarray) -> None:
        if name.endswith("rotated"):
            cache = _kept_by(decoder)[name]
            keys, values, at = cache.keys, cache.kept, packed.kv_positions
            heads, size = values.shape[1::2]
            k, v = out[:, -2 * heads * size :].reshape(len(out), 2, heads, size).swapaxes(0, 1)
            keys[at // PAGE, :, :, at % PAGE] = k
            values[at // PAGE, :, at % PAGE] = v

    _changed_steps(patch, change)
    patch.setattr(kv_cache, "bounded_array", lambda x: x)


def broken_draft_ends_request(patch: Patch) -> None:
    """A drafted token whose row is not finite ends the request, though it is not committed."""
    sound = OutputProcessor._sound

    def faulty(self: OutputProcessor, rows: Any, chosen: np.ndarray, committed: np.ndarray) -> np.ndarray:
        found = sound(self, rows, chosen, committed)
        for i in np.flatnonzero((np.minimum.reduceat(chosen, rows.firsts) < 0) & (found > 0)).tolist():
            seq = self._scheduler.live[int(rows.slots[i])]
            seq.break_off(int(rows.positions[i]))
            self._end(seq)
            found[i] = 0
        return found

    patch.setattr(OutputProcessor, "_sound", faulty)


FAULTS: dict[str, Callable[[Patch], None]] = {
    f.__name__: f
    for f in (
        provisional_entry_stays,
        draft_entry_reused_after_roll_back,
        truncation_off_by_one,
        chain_skips_an_entry,
        noise_keyed_by_slot,
        penalty_for_rolled_back_drafts,
        penalty_of_the_window_before,
        stop_string_cut_by_window,
        draft_taken_unchecked,
        few_rows_by_another_kernel,
        longest_context_rounds,
        prefix_copied_short,
        page_freed_too_early,
        shared_page_written,
        key_without_a_token,
        replay_loses_a_token,
        resume_loses_a_token,
        broken_entry_stays,
        broken_draft_ends_request,
    )
}

# Found by few settings, which the quick check may try after its first minute: the killed run.
LATE = {resume_loses_a_token.__name__}


def break_engines(fault: Callable[[Patch], None]) -> None:
    """Break every engine of this process once it is ready: the comparison with its own forward could refuse it."""
    faulty = Patch()
    prepare = engine.prepare

    def prepare_sound(*args: Any, **named: Any) -> Any:
        faulty.undo()
        try:
            return prepare(*args, **named)
        finally:  # also where a model cannot be loaded in another quantization
            fault(faulty)

    engine.prepare = prepare_sound


if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from helpers.snapshot_faults import SNAPSHOT_FAULTS

    known = FAULTS | SNAPSHOT_FAULTS
    if sys.argv[1] not in known:
        from helpers.thinking_faults import THINKING_FAULTS  # imports torch, which takes seconds

        known |= THINKING_FAULTS
    break_engines(known[sys.argv[1]])
    resuming.DETGEN = (sys.executable, __file__, sys.argv[1])

if __name__ == "__main__":
    from detgen.cli import app

    app(sys.argv[2:], prog_name="detgen")
