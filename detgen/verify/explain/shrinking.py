"""From a setting that differs to the smallest one that does: axis by axis back to the reference, then fewer prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from detgen.verify.perturb.axes import Axes, Setting, Value, consistent
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case

Differs = Callable[[Case], bool]

_SLOW = ("process", "quant", "sampling")  # tried first, since they make every further step cheaper


def shrink(case: Case, axes: Axes, pool: Pool, differs: Differs, deadline: float) -> Case:
    """The smallest case that still differs, as far as it is found in time.

    Args:
        case: one that differs.
        axes: what may go back to the reference.
        pool: the prompts that the case is made of.
        differs: whether a case does.
        deadline: as `time.monotonic`.
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
    """The case under another setting, with requests that are sampled as it says."""
    same = setting.sampling == case.setting.sampling
    return Case(setting, case.watched if same else pool.resampled(case.watched, setting.sampling))


def _smaller(setting: Setting, name: str, values: tuple[Value, ...]) -> Iterator[Setting]:
    """The setting with one axis at a value before its own, the reference's first."""
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
    """Leave out prompts, in halves and then one by one, while what is left still differs."""
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
