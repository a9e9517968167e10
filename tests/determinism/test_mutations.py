"""The check can fail: the engine broken on purpose, in one way each, and found by the settings of the quick check.

Each fault is a function that breaks the engine by monkeypatching. `detgen verify-determinism` finds the same faults
with its own prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from detgen.determinism.axes import Setting, make_axes
from detgen.determinism.checking import Case, Check
from detgen.determinism.explaining import explain
from detgen.determinism.prompts import Pool
from detgen.engine import decoding, verification
from detgen.engine.forward import Forward
from detgen.engine.kv_cache import KVCache
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stopping import Stopping
from detgen.kernels.linear import PackedLinear
from detgen.kernels.packing import Shapes, Window
from detgen.kernels.sampling import Choice
from detgen.outputs.journal import Journal

Patch = pytest.MonkeyPatch
ATTEND = F.scaled_dot_product_attention


def padding_row_leaks(patch: Patch) -> None:
    """Padding rows write their entries over a position of the first slot."""
    patch.setattr(Shapes, "fit_rows", lambda self, rows: -(-rows // 8) * 8)
    patch.setattr(KVCache, "scratch", property(lambda self: 2))


def provisional_entry_stays(patch: Patch) -> None:
    """The canonical pass leaves the entries of drafted tokens as the drafting left them."""
    _keep_old(patch, lambda w, drafted: range(w.start + 1, w.start + len(w.tokens)) if w.logits > 1 else range(0))


def draft_entry_reused_after_roll_back(patch: Patch) -> None:
    """The entry that a rejected token wrote is taken for that of the token committed in its place."""
    _keep_old(patch, lambda w, drafted: range(w.start, w.start + 1) if w.slot in drafted else range(0))


def _keep_old(patch: Patch, kept: Callable[[Window, set[int]], range]) -> None:
    run = Forward.run
    drafted: set[int] = set()

    def faulty(self: Forward, windows: list[Window], shapes: Shapes) -> torch.Tensor:
        if shapes.rows == (1, 512):  # the fast path and the draft model
            return run(self, windows, shapes)
        arena = [w.slot * self.cache.stride + p for w in windows for p in kept(w, drafted)]
        layers = [*self.cache.keys, *self.cache.values]
        before = [entries[arena].clone() for entries in layers]
        logits = run(self, windows, shapes)
        for entries, old in zip(layers, before, strict=True):
            entries[arena] = old
        drafted.clear()
        drafted.update(w.slot for w in windows if w.logits > 1)
        return logits

    patch.setattr(Forward, "run", faulty)


def truncation_off_by_one(patch: Patch) -> None:
    """One position more than was computed counts as cached."""
    advance = Scheduler.advance
    patch.setattr(Scheduler, "advance", lambda self, seq, cached: advance(self, seq, cached + (seq.generated > 0)))


def noise_keyed_by_slot(patch: Patch) -> None:
    """The sampling noise depends on the place in the batch."""
    choice = Sequence.choice

    def faulty(self: Sequence, ahead: int = 0) -> Choice:
        found = choice(self, ahead)
        return replace(found, seed=found.seed + self.slot)

    patch.setattr(Sequence, "choice", faulty)


def tile_of_one_row(patch: Patch) -> None:
    """The smallest tiles are computed a row at a time, which takes another kernel."""

    def faulty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, scale: float) -> Any:
        if q.shape[2] > 4:
            return ATTEND(q, k, v, attn_mask=attn_mask, scale=scale)
        rows = [
            ((q[:, :, i : i + 1] * scale) @ k.transpose(2, 3) + attn_mask[:, :, i : i + 1]) for i in range(q.shape[2])
        ]
        return torch.cat([torch.softmax(r, -1) @ v for r in rows], dim=2)

    patch.setattr(F, "scaled_dot_product_attention", faulty)


def key_blocks_relative_to_window(patch: Patch) -> None:
    """Keys are summed from the window's own beginning on, and round."""

    def faulty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, scale: float) -> Any:
        first = int((attn_mask == 0).sum(-1).min()) if attn_mask.numel() else 0
        k, v = k.roll(-first, 2), v.roll(-first, 2)
        return ATTEND(q, k, v, attn_mask=attn_mask.roll(-first, 3), scale=scale)

    patch.setattr(F, "scaled_dot_product_attention", faulty)


def softmax_unpadded(patch: Patch) -> None:
    """A tile's keys end with its longest row instead of a whole block."""

    def faulty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, scale: float) -> Any:
        end = int((attn_mask == 0).sum(-1).max())
        weights = torch.softmax((q @ k[:, :, :end].transpose(2, 3)) * scale + attn_mask[..., :end], -1)
        return weights @ v[:, :, :end]

    patch.setattr(F, "scaled_dot_product_attention", faulty)


def stop_string_cut_by_window(patch: Patch) -> None:
    """Stop strings are looked for at the first token of a window only."""
    stopped = Stopping._stopped
    patch.setattr(Stopping, "_stopped", lambda self, seq, pending: len(pending) == 1 and stopped(self, seq, pending))


def draft_taken_unchecked(patch: Patch) -> None:
    """The first drafted token is accepted whatever the model says."""
    patch.setattr(
        decoding,
        "verify",
        lambda drafted, chosen, ends: verification.verify(drafted, [*(drafted or chosen)[:1], *chosen[1:]], ends),
    )


def few_rows_by_another_kernel(patch: Patch) -> None:
    """Linear layers of one row round otherwise than those of more."""
    forward = PackedLinear.forward

    def faulty(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return (out.double() * (1 + 1e-7)).to(out.dtype) if x.shape[-2] == 1 else out

    patch.setattr(PackedLinear, "forward", faulty)


def prefix_copied_short(patch: Patch) -> None:
    """One position too few is copied from the slot that shares a prompt's beginning."""
    copy = KVCache.copy_prefix
    patch.setattr(KVCache, "copy_prefix", lambda self, a, b, length: copy(self, a, b, length - 1))


FAULTS = (
    padding_row_leaks,
    provisional_entry_stays,
    draft_entry_reused_after_roll_back,
    truncation_off_by_one,
    noise_keyed_by_slot,
    tile_of_one_row,
    key_blocks_relative_to_window,
    softmax_unpadded,
    stop_string_cut_by_window,
    draft_taken_unchecked,
    few_rows_by_another_kernel,
    prefix_copied_short,
)


def resume_loses_a_token(patch: Patch) -> None:
    """A sample that comes from the journal is written without its last token."""
    read = Journal.read

    def faulty(self: Journal, offset: int) -> Any:
        entry = read(self, offset)
        line = json.loads(entry.output)
        line["token_ids"] = line["token_ids"][:-1]
        return replace(entry, output=json.dumps(line) + "\n")

    patch.setattr(Journal, "read", faulty)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_found(
    fault: Callable[[Patch], None],
    monkeypatch: Patch,
    make_check: Callable[..., Check],
    pool: Pool,
    selection: list[Setting],
) -> None:
    """The pairwise settings find the fault."""
    fault(monkeypatch)
    check = make_check(pool)
    check.learn()
    for setting in selection:
        if failures := check.run([setting], None).failures:
            assert failures[0].error is None
            return
    pytest.fail(f"{len(selection)} settings, and none differs")


def test_sound_engine_passes(make_check: Callable[..., Check], pool: Pool, selection: list[Setting]) -> None:
    """The same settings find nothing in the engine as it is."""
    check = make_check(pool)
    check.learn()
    result = check.run(selection[:20], None)
    assert result.failures == []
    assert result.total.equal
    assert result.total.settings == 20
    assert result.total.positions > 2000
    assert result.total.logits > 500


def test_resumption_that_loses_a_token(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """Found by the axis of processes, which writes files."""
    resume_loses_a_token(monkeypatch)
    axes = make_axes(has_draft=True, quants=["none"], processes=True, cores=2)
    with make_check(pool, axes=axes) as check:
        check.learn()
        setting = Setting(batch=2, drafter="ngram", process="resumed")
        failures = check.run([setting], 1).failures
    assert [f.difference.what for f in failures] == ["token"]
    assert failures[0].difference.tokens[1] is None


def test_explained(monkeypatch: Patch, make_check: Callable[..., Check], pool: Pool) -> None:
    """A fault of the linear layers is traced to the first of them, under the smallest setting."""
    few_rows_by_another_kernel(monkeypatch)
    check = make_check(pool)
    check.learn()
    setting = Setting(batch=3, order="reversed", neighbours="early", drafter="adversary", length=4, threads=1)
    failure = check.attempt(Case(setting, pool.watched(setting)))
    assert failure is not None
    finding = explain(check, failure, seconds=30)
    assert finding.error is None
    # Behind the last attention only the one row whose logits are wanted goes on; two prompts make it two.
    assert finding.case.setting.changed() == {"batch": 2}
    assert len(finding.case.watched) == 2
    assert finding.origin is not None
    assert finding.origin.module == "layers.5.o_proj"
    assert 1 <= finding.origin.ulp < 10
    assert finding.origin.rows == (1, 2)
    assert finding.as_dict()["origin"]["text"].startswith("layers.5.o_proj: row ")
