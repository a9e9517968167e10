"""From a setting that differs to the smallest one that does: axis by axis back to the reference, then fewer prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from detgen.determinism.axes import Axis, Setting, consistent
from detgen.determinism.checking import Case

Differs = Callable[[Case], bool]


def shrink(case: Case, axes: list[Axis], differs: Differs, deadline: float) -> Case:
    """The smallest case found in the time there is that still differs.

    Args:
        case: one that differs.
        axes: what may be turned back.
        differs: whether a case does.
        deadline: as `time.monotonic`.
    """
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for smaller in _smaller(case.setting, axes):
            if time.monotonic() > deadline:
                break
            if differs(replace(case, setting=smaller)):
                case, changed = replace(case, setting=smaller), True
                break
    return _fewer(case, differs, deadline)


def _smaller(setting: Setting, axes: list[Axis]) -> Iterator[Setting]:
    """The setting with one axis turned back: to the reference if it can be, else to any value before its own."""
    if setting.drafter != "none":
        yield replace(setting, drafter="none", length=None, window=None)
    dear = ("process", "quant", "sampling")  # first what makes every further step cheaper
    for axis in sorted(axes, key=lambda a: a.name not in dear):
        value = getattr(setting, axis.name)
        before = axis.values[: axis.values.index(value)] if value in axis.values else ()
        for other in before:
            smaller = setting.turned(axis.name, other)
            if consistent(smaller):
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
