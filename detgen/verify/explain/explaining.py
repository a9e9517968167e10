"""Explain a failure: the smallest setting, the token and its logits, the first module that differs.

Shrinking starts from the setting that differs, goes back to the reference axis by axis, then leaves out prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from detgen.verify.explain.localizing import Origin, Recording, locate
from detgen.verify.perturb.axes import Axes, Setting, Value, consistent
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Difference
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case, Failure

_MINUTE = 44.0  # seconds of a check's first minute; the rest is for finding where a difference comes from
_CHAINED = (
    "nothing differs where each pass is a call of its own: the difference arises in chains, or in the scores of rows"
)
_LEAST, _MOST = 5.0, 20.0  # seconds for shrinking
Differs = Callable[[Case], bool]
_SLOW = ("process", "quant", "sampling")  # tried first, since they make every further step cheaper


@dataclass(frozen=True, slots=True)
class Explanation:
    """A difference, explained.

    Attributes:
        case: the smallest case found that differs.
        first: the case that the check found.
        difference: the difference in the smallest case.
        prompt: its text.
        words: the two tokens as text.
        logits: logits of both tokens, in the reference and here; empty if unknown.
        origin: where it comes from; None if that could not be examined.
        error: the error that was raised, if that is the difference.
    """

    case: Case
    first: Case
    difference: Difference
    prompt: str
    words: tuple[str, str]
    logits: tuple[tuple[float, float], ...]
    origin: Origin | None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "setting": self.case.setting.changed(),
            "reference": self.case.setting.reference().changed(),
            "first_setting": self.first.setting.changed(),
            "requests": [r.id for r in self.case.watched],
            "difference": asdict(self.difference),
            "prompt": self.prompt,
            "tokens": self.words,
            "logits": self.logits,
            "origin": None if self.origin is None else {**asdict(self.origin), "text": str(self.origin)},
            "error": self.error,
        }


def explain(check: Check, failure: Failure, seconds: float | None = None) -> Explanation:
    """Shrink a failure and find where it comes from.

    Args:
        check: the check that found it.
        failure: what it found.
        seconds: approximate limit for shrinking; None takes what is left of the check's first minute.
    """
    check.observer.message("something differs; looking for the smallest setting that shows it")
    if seconds is None:
        seconds = time_for_shrinking(time.monotonic() - check.started)
    deadline = time.monotonic() + seconds

    def differs(case: Case) -> bool:
        found = check.attempt(case)
        return found is not None and (found.error is None or failure.error is not None)

    smallest = shrink(failure.case, check.axes, check.pool, differs, deadline)
    for case in (smallest, failure.case):  # a difference that depends on what ran before comes and goes
        if (found := check.attempt(case)) is not None:
            break
    else:  # only what was seen first can be reported
        return _plain(failure, failure.case, failure.error or "it did not show again when repeated")
    if found.error is not None:
        return _plain(failure, case, found.error)
    return _look(check, failure, case, found.difference)


def time_for_shrinking(passed: float) -> float:
    """Return the seconds for shrinking after so many of the check: the rest of a minute, within bounds."""
    return min(max(_MINUTE - passed, _LEAST), _MOST) if passed < _MINUTE else _MOST


def _plain(failure: Failure, case: Case, error: str) -> Explanation:
    return Explanation(case, failure.case, failure.difference, "", ("", ""), (), None, error)


def _look(check: Check, failure: Failure, case: Case, difference: Difference) -> Explanation:
    """Repeat reference and case with hooks."""
    engine = check.subject.engine(case.setting.quant)
    request = next(r for r in case.watched if r.id == difference.id)
    prompt = engine.tokenizer.decode(engine.encode(request))
    words = [("" if t is None else repr(engine.tokenizer.decode([t]))) for t in difference.tokens]
    origin: Origin | None = None
    logits: tuple[tuple[float, float], ...] = ()
    if case.setting.process != "fresh":
        if difference.what == "missing":
            origin = Origin(note=_why_missing(check, case, difference))
        else:
            origin, logits = _where(check, case, difference)
    return Explanation(case, failure.case, difference, prompt, (words[0], words[1]), logits, origin)


def _where(check: Check, case: Case, difference: Difference) -> tuple[Origin, tuple[tuple[float, float], ...]]:
    """Return the first module that differs, and the logits of the two tokens."""
    if case.setting.chains and check.attempt(replace(case, setting=case.setting.turned("chains", False))) is None:
        return Origin(note=_CHAINED), ()
    reference = check.reference_task(case)
    mine = [r for r in reference.queue if r.id == difference.id]
    with check.subject.configured(reference) as engine:
        ours = Recording(engine, difference).run(mine)
    task = check.task(case, check.reference(case))
    with check.subject.configured(task) as engine:
        theirs = Recording(engine, difference).run(task.queue)
    return locate(ours, theirs), _logits(difference, [t.logits if t else None for t in (ours, theirs)])


def _why_missing(check: Check, case: Case, difference: Difference) -> str:
    """Return a note about the error that a sample ends with here but not in the reference."""
    task = check.task(case, check.reference(case))
    with check.subject.configured(task) as engine:
        done = [c for finished in engine.stream(task.queue) for c in finished]
    errors = (c.error for c in done if (c.request.id, c.sample) == (difference.id, difference.sample))
    return f"not looked for, since the sample ends with an error: {next(errors, None)}"


def _logits(difference: Difference, seen: list[np.ndarray | None]) -> tuple[tuple[float, float], ...]:
    """Return the logits of the two tokens in the reference and here."""
    a, b = difference.tokens
    if a is None or b is None or any(x is None for x in seen):
        return ()
    return tuple((float(x[a]), float(x[b])) for x in seen if x is not None)


def shrink(case: Case, axes: Axes, pool: Pool, differs: Differs, deadline: float) -> Case:
    """Return the smallest case that still differs, as far as it is found in time.

    Args:
        case: a case that differs.
        axes: the axes whose values may go back to the reference's.
        pool: the prompts of the case.
        differs: returns whether a case differs.
        deadline: in the time of `time.monotonic`.
    """
    tried = {case.setting}
    found: Setting | None = case.setting
    while found is not None:
        found = None
        for name in sorted(axes, key=lambda a: (a not in _SLOW, a != "drafter")):
            for smaller in _smaller(case.setting, name, axes[name]):
                if time.monotonic() > deadline:
                    return case
                if smaller not in tried and differs(turned := _turned(case, smaller, pool)):
                    case, found = turned, smaller
                    break
                tried.add(smaller)
    return _fewer(case, differs, deadline)


def _turned(case: Case, setting: Setting, pool: Pool) -> Case:
    """Return the case under another setting, with requests resampled accordingly."""
    same = setting.sampling == case.setting.sampling
    return Case(setting, case.watched if same else pool.resampled(case.watched, setting.sampling))


def _smaller(setting: Setting, name: str, values: tuple[Value, ...]) -> Iterator[Setting]:
    """Yield the setting with one axis at each earlier value, the reference's first."""
    value = getattr(setting, name)
    for other in values[: values.index(value)] if value in values else ():
        if name == "neighbours" and other == "long":
            continue  # the long neighbour is one of the case's own requests
        smaller = setting.turned(name, other)
        if other == "none" and name == "drafter":
            smaller = replace(smaller, draft_tokens=None)
        if consistent(asdict(smaller)):
            yield smaller


def _fewer(case: Case, differs: Differs, deadline: float) -> Case:
    """Leave out prompts, in halves and then one by one, while the rest still differs."""
    size = len(case.watched) // 2
    while size >= 1:
        at = 0
        while at < len(case.watched) and len(case.watched) > 1:
            if time.monotonic() > deadline:
                return case
            fewer = replace(case, watched=case.watched[:at] + case.watched[at + size :])
            if fewer.watched and differs(fewer):
                case = fewer
            else:
                at += size
        size //= 2
    return case
