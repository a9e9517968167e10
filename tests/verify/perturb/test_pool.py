"""The requests of a check: windows that are filled, requests that are sampled again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from detgen.kernels.input_batch import Window
from detgen.runner.model_runner import ModelRunner
from detgen.verify.perturb.axes import SAMPLING, Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Tally
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case


@pytest.mark.parametrize("window", [4, 16, 64])
def test_windows_are_filled(
    monkeypatch: pytest.MonkeyPatch, make_check: Callable[..., Check], pool: Pool, window: int
) -> None:
    """However few tokens most requests have, some window is drafted and verified whole, beside other requests."""
    assert max(r.params.max_tokens for r in pool.requests) < 64
    check = make_check(pool)
    check.learn()
    verified: list[list[int]] = []
    run = ModelRunner.run

    def watched(self: ModelRunner, windows: list[Window], broken: list[int] | None = None, **scored: bool) -> object:
        verified.append([w.logits - 1 for w in windows])  # the fast path's are of one row
        return run(self, windows, broken, **scored)

    setting = Setting(batch=2, drafter="oracle", draft_tokens=window)
    requests = pool.watched(setting)
    check.reference(Case(setting, requests))
    monkeypatch.setattr(ModelRunner, "run", watched)
    assert check.attempt(Case(setting, requests)) is None
    assert max(max(lengths) for lengths in verified) == window
    assert any(window in lengths and len(lengths) > 1 for lengths in verified)


def test_windows_of_several_sizes_are_compared_with_references_of_their_own(
    make_check: Callable[..., Check], pool: Pool
) -> None:
    check = make_check(pool)
    check.learn()
    sizes = [Setting(batch=2, drafter="oracle", draft_tokens=n) for n in (16, 64)]
    assert check.run([*sizes, *(size.turned("preemption", True) for size in sizes)]).failures == []


@pytest.mark.parametrize("kind", SAMPLING)
def test_resampled(make_check: Callable[..., Check], pool: Pool, kind: str) -> None:
    """Requests of one kind of sampling become exactly those of another."""
    make_check(pool).learn()
    setting = Setting(batch=3, drafter="oracle", draft_tokens=64, sampling=kind)
    others = [pool.watched(setting.turned("sampling", other)) for other in SAMPLING]
    assert all(pool.resampled(watched, kind) == pool.watched(setting) for watched in others)


def test_long_prompts_are_compared(make_check: Callable[..., Check], pool: Pool) -> None:
    """The long neighbour is one of the watched, and as long as the model's context allows."""
    pool.long = "x = 1\n" * 700
    check = make_check(pool)
    check.learn()
    longest = max(len(r.prompt or "") for r in pool.requests)
    assert longest < len(pool.long) < 6 * 700
    setting = Setting(batch=3, neighbours="long", order="reversed")
    case = Case(setting, pool.watched(setting))
    (long,) = [r for r in case.watched if r.prompt == pool.long]
    tally = Tally()
    assert check.attempt(case, tally) is None
    assert (long.id, 0) in check.reference(case)
    assert tally.positions > len(check.subject.engine().encode(long)) > 200
