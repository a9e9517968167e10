"""From a failure to an explanation: the smallest setting, the token and its logits, the first module that differs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from detgen.check.checking import Case, Check, Failure
from detgen.check.comparing import Difference
from detgen.explain.localizing import Origin, Recording, locate
from detgen.explain.shrinking import shrink


@dataclass(frozen=True, slots=True)
class Finding:
    """An explained difference.

    Attributes:
        case: the smallest case that was found to differ.
        first: the case that was found first.
        difference: in the smallest case.
        prompt: the beginning of the prompt.
        words: the two tokens, as text.
        logits: of both tokens, in the reference and here; empty where they are not known.
        origin: where it comes from, None if that could not be looked at.
        error: what was raised, where that is the difference.
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
        """For JSON."""
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


def explain(check: Check, failure: Failure, seconds: float) -> Finding:
    """Shrink a failure for at most about so many seconds, and look where it comes from."""
    deadline = time.monotonic() + seconds

    def differs(case: Case) -> bool:
        try:
            return bool(check.compare(case).differences)
        except Exception:
            return failure.error is not None

    case = shrink(failure.case, check.axes, check.pool, differs, deadline)
    try:
        differences = check.compare(case).differences
    except Exception as error:
        return _plain(failure, case, failure.difference, f"{type(error).__name__}: {error}")
    if not differences:  # it comes and goes: what was seen first is all there is to say
        return _plain(failure, failure.case, failure.difference, failure.error or "it did not show again when repeated")
    return _look(check, failure, case, differences[0])


def _plain(failure: Failure, case: Case, difference: Difference, error: str | None) -> Finding:
    return Finding(case, failure.case, difference, "", ("", ""), (), None, error)


def _look(check: Check, failure: Failure, case: Case, difference: Difference) -> Finding:
    """Generate reference and case again with hooks."""
    engine = check.subject.engine(case.setting.quant)
    request = next(r for r in case.watched if r.id == difference.id)
    prompt = engine.tokenizer.decode(engine.encode(request))
    words = [("" if t is None else repr(engine.tokenizer.decode([t]))) for t in difference.tokens]
    origin: Origin | None = None
    logits: tuple[tuple[float, float], ...] = ()
    if case.setting.process != "fresh" and difference.what != "missing":
        reference = check.reference_task(case)
        mine = [r for r in reference.queue if r.id == difference.id]
        ours = Recording(check.subject.configured(reference), difference).run(mine)
        task = check.task(case, check.reference(case))
        theirs = Recording(check.subject.configured(task), difference).run(task.queue)
        origin = locate(ours, theirs)
        logits = _logits(difference, [t.logits if t else None for t in (ours, theirs)])
    return Finding(case, failure.case, difference, prompt, (words[0], words[1]), logits, origin)


def _logits(difference: Difference, seen: list[torch.Tensor | None]) -> tuple[tuple[float, float], ...]:
    """Logits of the two tokens in the reference and here."""
    a, b = difference.tokens
    if a is None or b is None or any(x is None for x in seen):
        return ()
    return tuple((float(x[a]), float(x[b])) for x in seen if x is not None)
