"""A whole check within the given time: prompts, engine, axes and settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from detgen.errors import CheckError, EngineError
from detgen.progress import Observer
from detgen.verify.perturb.axes import QUANTS, make_axes
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.interface import CheckConfig
from detgen.verify.perturb.prompts import FEW, FULL, QUICK, read_pool, with_calls
from detgen.verify.perturb.running import Subject
from detgen.verify.perturb.selecting import read_axes, select
from detgen.verify.perturb.timing import OutOfTime
from detgen.verify.replay.reading import refusal

_SHARE = 4  # one part in so many of the time may go into loading what only some settings need


@contextmanager
def run_check(asked: CheckConfig, observer: Observer, began: float | None = None) -> Iterator[Check]:
    """Check the contract. Yield the check, which can try more.

    Args:
        asked: models, prompts, and what to try.
        observer: receives messages and progress.
        began: start of the limited time, in the time of `time.monotonic`; None is now.

    Raises:
        PromptsError: if no prompt can be read.
        EngineError: if the engine cannot be built.
        CheckError: if there is no such axis, no prompt can run, or time is over before a setting can be tried.
    """
    began = time.monotonic() if began is None else began
    config, minutes = asked.engine, asked.minutes
    deadline = None if minutes is None else began + 60 * minutes
    names, extent = read_axes(asked.axis), FULL if asked.full else QUICK
    pool = read_pool(asked.prompts, config.target, asked.limit, extent)
    config = replace(config, drafter="auto", batch_size=max(len(pool.requests), FEW) + 8)
    subject = Subject(config, observer=observer)
    with Check(config, pool, {}, asked.seed, observer, subject) as check:
        engine = subject.engine()
        if asked.prompts is None:
            pool.requests = with_calls(pool.requests, lambda request: refusal(engine, request) is None)
        now = time.monotonic()
        start = now - began
        observer.message(f"{len(pool.requests)} prompts, {engine.profile()['target']['name']}, seed {asked.seed}")
        elsewhere = all(isinstance(model, str | Path | None) for model in (config.target, config.draft))
        processes = elsewhere and (not names or "process" in names)
        if processes and (deadline is None or _SHARE * start < deadline - now):
            check.fresh.load("none")  # while this process loads other quantizations
        quants = ["none"]
        if elsewhere and config.target_quant == "none" and (not names or "quant" in names):
            others = start * (len(QUANTS) - 1)
            if "quant" in names or deadline is None or _SHARE * others < deadline - now:
                until = None if deadline is None else now + (deadline - now) / _SHARE
                quants += _quants(subject, check.result.notes, observer, until)
            else:
                check.result.notes.append(
                    "not tried for lack of time: the axis quantization, which loads the target"
                    f" {len(QUANTS) - 1} more times; --axis quant tries it"
                )
        try:
            check.learn(deadline, start)
        except OutOfTime:
            raise _too_short(minutes, start, "the reference") from None
        check.axes = make_axes(
            drafters=engine.drafters,
            quants=quants,
            processes=processes,
            thinks=engine.thinks,
            requests=len(pool.requests),
        )
        settings, check.result.pairs, more = select(check.axes, names, extent.random, asked.seed)
        check.run(settings, more if minutes and not names else (), deadline)
        if not check.result.total.settings:
            raise _too_short(minutes, start, "a setting")
        yield check


def _too_short(minutes: float | None, start: float, what: str) -> CheckError:
    return CheckError(
        f"--minutes {minutes or 0:g} is too short: it took {start:.0f} s to load the models, and what was left is no"
        f" time for {what}; give more minutes"
    )


def _quants(subject: Subject, notes: list[str], observer: Observer, until: float | None) -> list[str]:
    """Return the other quantizations of the target that can be tried here and are loaded before `until`."""
    found = []
    for quant in QUANTS[1:]:
        if until is not None and time.monotonic() > until:
            notes.append(f"not tried for lack of time: quantization {', '.join(QUANTS[QUANTS.index(quant) :])}")
            break
        observer.stage(f"loading the target once more, quantized by {quant}, for the axis quantization")
        try:
            subject.engine(quant)
        except (EngineError, RuntimeError, ValueError) as error:
            notes.append(f"the axis quantization was tried without {quant}: {error}")
        else:
            found.append(quant)
    return found
