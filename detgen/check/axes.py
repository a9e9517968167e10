"""What may change without changing an output: the axes, and settings as points on them.

Plain data. The first value of each axis is that of the reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

Value = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to generate; by default, the reference.

    Attributes:
        batch: most requests at a time; "all" of them.
        order: "file", "reversed" or "shuffle 1", ...
        neighbours: who else is in the batch: "none", "others", "long" (a very long prompt, compared too), "early"
            (soon finished).
        slot: places by which the queue is rotated, so that each request takes another slot.
        drafter: one of detgen's, or "adversary" (wrong at random depths), "oracle" (always right).
        draft_tokens: drafted per round; None adapts.
        verify_window: tokens between verifications of the drafter self; None for the others.
        chunk: most prompt tokens per pass; None reads the prompt whole.
        reuse: take over KV entries of prompts that begin alike.
        threads: CPU threads; 0 is all cores.
        process: "this", "fresh" (another one), or "resumed": a `detgen run` that is killed and run again.
        sampling: kind of sampling of all requests; each has a reference of its own.
        unverified: requests with `deterministic: false` beside the others.
        quant: quantization of the target; each has a reference of its own.
    """

    batch: int | str = 1
    order: str = "file"
    neighbours: str = "none"
    slot: int = 0
    drafter: str = "none"
    draft_tokens: int | None = None
    verify_window: int | None = None
    chunk: int | None = None
    reuse: bool = False
    threads: int = 0
    process: str = "this"
    sampling: str = "greedy"
    unverified: int = 0
    quant: str = "none"

    def changed(self) -> dict[str, Value]:
        """The axes on which it differs from the reference, and its values there."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def turned(self, axis: str, value: Any) -> Setting:
        """The same setting with another value on one axis."""
        return replace(self, **{axis: value})

    def reference(self) -> Setting:
        """The setting that it must agree with bit for bit."""
        return Setting(sampling=self.sampling, quant=self.quant)

    def __str__(self) -> str:
        shown = [f"{TITLES[name]} {name_value(name, value)}" for name, value in self.changed().items()]
        return ", ".join(shown) or "the reference"


TITLES = {
    "batch": "batch size",
    "order": "prompt order",
    "neighbours": "neighbours",
    "slot": "slot",
    "drafter": "drafter",
    "draft_tokens": "draft tokens",
    "verify_window": "verify window",
    "chunk": "prompt chunk",
    "reuse": "prefix reuse",
    "threads": "threads",
    "process": "process",
    "sampling": "sampling",
    "unverified": "unverified requests",
    "quant": "quantization",
}

# Kinds of sampling; the stop strings of "stop" are taken from the greedy text, so that they do stop.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop": {"logprobs": 2},
    "T=0.7 top-k": {"temperature": 0.7, "top_k": 40, "seed": 3},
    "T=1.3 top-p": {"temperature": 1.3, "top_p": 0.95, "seed": 11},
    "T=1.3 n=2": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "seed": 2**40 + 7, "n": 2},
}

_NONE = {"draft_tokens": "adaptive", "verify_window": "-", "chunk": "whole"}


def name_value(axis: str, value: Value) -> str:
    """A value in words."""
    if value is None:
        return _NONE[axis]
    if axis == "threads":
        return str(value or "all")
    if axis == "reuse":
        return "on" if value else "off"
    return str(value)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        name: field of `Setting`.
        values: what to try, the reference's first.
        beside: the other axes' values when this one is tried alone.
    """

    name: str
    values: tuple[Value, ...]
    beside: Setting = field(default_factory=Setting)


def make_axes(*, has_draft: bool, quants: Iterable[str], processes: bool, cores: int | None = None) -> list[Axis]:
    """All axes of a model on this machine.

    Args:
        has_draft: whether there is a draft model.
        quants: quantizations to try, the reference's first.
        processes: whether other processes can load the same model.
        cores: CPU cores; None asks the machine.
    """
    cores = cores or os.cpu_count() or 1
    full = Setting(batch=8)
    drafters = ("none", *(("model",) if has_draft else ()), "ngram", "self", "auto", "adversary", "oracle")
    axes = [
        Axis("batch", (1, 2, 3, 8, 16, 64, "all")),
        Axis("order", ("file", "reversed", "shuffle 1", "shuffle 2"), full),
        Axis("neighbours", ("none", "others", "long", "early"), full),
        Axis("slot", (0, 1, 5), full),
        Axis("drafter", drafters, full),
        Axis("draft_tokens", (None, 1, 2, 3, 4, 5, 6, 7, 8), replace(full, drafter="adversary")),
        Axis("verify_window", (None, 4, 16, 64), full),
        Axis("chunk", (None, 1, 7, 64), full),
        Axis("reuse", (False, True), full),
        Axis("threads", (0, *(n for n in (1, 2) if n < cores)), full),
        Axis("process", ("this", "fresh", "resumed") if processes else ("this",), full),
        Axis("sampling", tuple(SAMPLING), replace(full, drafter="ngram", draft_tokens=4)),
        Axis("unverified", (0, 1, 4), full),
        Axis("quant", tuple(quants), full),
    ]
    return [a for a in axes if len(a.values) > 1]


def allowed(a: str, x: Value, b: str, y: Value) -> bool:
    """Whether two values of two axes can stand together and both have an effect."""
    pair = {a: x, b: y}
    drafter = pair.get("drafter")
    if pair.get("process") == "resumed":  # only what the command line of `detgen run` offers, which reuses prefixes
        return drafter not in ("adversary", "oracle") and pair.get("chunk") is None and pair.get("reuse") is not False
    if "draft_tokens" in pair and "drafter" in pair:
        return pair["draft_tokens"] is None or drafter not in ("none", "self")
    if "verify_window" in pair and "drafter" in pair:
        return (pair["verify_window"] is not None) == (drafter == "self")
    if "verify_window" in pair and "draft_tokens" in pair:
        return pair["verify_window"] is None or pair["draft_tokens"] is None
    if "slot" in pair and "batch" in pair:
        return not (pair["slot"] and pair["batch"] == 1)
    return True


def consistent(setting: Setting) -> bool:
    """Whether all of a setting's values can stand together."""
    names = [f.name for f in fields(setting)]
    return all(
        allowed(a, getattr(setting, a), b, getattr(setting, b)) for i, a in enumerate(names) for b in names[i + 1 :]
    )


def alone(axis: Axis) -> list[Setting]:
    """The settings that change one axis only, and what its values need beside them."""
    needs: dict[tuple[str, Value], dict[str, Any]] = {
        ("drafter", "self"): {"verify_window": 4},
        ("process", "resumed"): {"reuse": True},
        **{("verify_window", window): {"drafter": "self"} for window in (4, 16, 64)},
    }
    found = [
        replace(axis.beside.turned(axis.name, value), **needs.get((axis.name, value), {})) for value in axis.values
    ]
    return [setting for setting in found if consistent(setting)]
