"""Axes, which may change without changing an output, and settings, which are points on them.

Plain data. The first value of each axis is the reference's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from detgen.drafters.registry import DRAFTERS
from detgen.errors import QuantName
from detgen.machine import usable_cores

Value = str | int | bool | None

# Kinds of sampling. The stop strings of "stop", and the biases and the stop token of "T=0.8 penalties", come from the
# reference's text, so that they have an effect. The prompts' own parameters are greedy unless a line sets others.
SAMPLING: dict[str, dict[str, Any]] = {
    "own": {},
    "stop": {"logprobs": 2},
    "T=0.7 top-k": {"temperature": 0.7, "top_k": 40, "seed": 3},
    "T=1.3 top-p": {"temperature": 1.3, "top_p": 0.95, "seed": 11},
    "T=1.3 n=2": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "seed": 2**40 + 7, "n": 2},
    "T=0.8 penalties": {
        "temperature": 0.8,
        "seed": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
    },
}

QUANTS: tuple[str, ...] = get_args(QuantName)  # the first is none
_WORDS: dict[tuple[str, Value], str] = {
    ("draft_tokens", None): "adaptive",
    ("chunk", None): "whole",
    ("speculative_prefill", "whole"): "whole prompt",
    ("threads", 0): "all",
    **{(axis, value): ("off", "on")[value] for axis in ("chains", "preemption") for value in (False, True)},
}


def _axis(title: str, *values: Value) -> Any:
    """Return a field of `Setting` with its title and the values to try, the reference's first."""
    return field(default=values[0], metadata={"title": title, "values": values})


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to generate; by default, the reference.

    Attributes:
        batch: most requests at a time, or "all" of them.
        order: "file", "reversed" or "shuffle 1", ...
        neighbours: other requests in the batch: "none", "others", "long" (a very long prompt, compared too), "early"
            (finishing soon), "broken" (a token's embedding is NaN while they run: they end with an error, and the
            adversary drafts that token for the others).
        slot: number of places by which the queue is rotated, so that each request takes another slot.
        drafter: one of detgen's, or "adversary" (wrong at random depths) or "oracle" (always right).
        draft_tokens: draft tokens per round; None adapts the number.
        chunk: most prompt tokens per pass; None reads a prompt in one pass.
        prefix_cache: "off", or sharing of KV entries between prompts that begin alike: "cold" (nothing is cached
            before), "warm" (the same requests ran before), "shared" (others that begin alike did).
        speculative_prefill: chunks of a prompt that a thinking model reads ahead: "off", a number, "auto", or the
            "whole" prompt.
        chains: chains of passes where nothing is drafted and, on CUDA, of rounds where a model drafts; no logits are
            kept that are not needed, so only tokens and KV entries are compared.
        preemption: a KV cache too small for the batch, so that sequences are preempted and replayed.
        threads: CPU threads; 0 is all cores.
        process: "this", "fresh" (another one), or "resumed" (a `detgen run` that is killed and run again).
        sampling: kind of sampling of all requests; each has a reference of its own.
        unverified: number of requests with `deterministic: false` beside the others.
        quant: quantization of the target; each has a reference of its own.
    """

    batch: int | str = _axis("batch size", 1, 2, 3, 8, 16, 64, "all")
    order: str = _axis("prompt order", "file", "reversed", "shuffle 1", "shuffle 2")
    neighbours: str = _axis("neighbours", "none", "others", "long", "early", "broken")
    slot: int = _axis("slot", 0, 1, 5)
    drafter: str = _axis("drafter", "none", "model", "self", "ngram", "auto", "adversary", "oracle")
    draft_tokens: int | None = _axis("draft tokens", None, 1, 2, 3, 4, 5, 6, 7, 8, 16, 64)
    chunk: int | None = _axis("prompt chunk", None, 1, 7, 64)
    prefix_cache: str = _axis("prefix cache", "off", "cold", "warm", "shared")
    speculative_prefill: int | str = _axis("speculative prefill", "off", 1, 3, "auto", "whole")
    chains: bool = _axis("chains", False, True)
    preemption: bool = _axis("preemption", False, True)
    threads: int = _axis("threads", 0, 1, 2)
    process: str = _axis("process", "this", "fresh", "resumed")
    sampling: str = _axis("sampling", *SAMPLING)
    unverified: int = _axis("unverified requests", 0, 1, 4)
    quant: str = _axis("quantization", *QUANTS)

    def changed(self) -> dict[str, Value]:
        """Return the axes on which it differs from the reference, with its values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def turned(self, axis: str, value: Any) -> Setting:
        """Return the same setting with another value on one axis."""
        return replace(self, **{axis: value})

    def reference(self) -> Setting:
        """Return the setting that it must agree with bit for bit."""
        return Setting(sampling=self.sampling, quant=self.quant)

    def __str__(self) -> str:
        shown = [f"{TITLES[name]} {name_value(name, value)}" for name, value in self.changed().items()]
        return ", ".join(shown) or "the reference"


TITLES: dict[str, str] = {f.name: f.metadata["title"] for f in fields(Setting)}


def name_value(axis: str, value: Value) -> str:
    """Return a value in words."""
    return _WORDS.get((axis, value), str(value))


Axes = dict[str, tuple[Value, ...]]  # values to try on each axis on this machine, the reference's first


def make_axes(
    *,
    drafters: Collection[str],
    quants: Iterable[str],
    processes: bool,
    cores: int | None = None,
    thinks: bool = False,
    requests: int = 64,
) -> Axes:
    """Return all axes that have more than one value here.

    Args:
        drafters: names of the engine's drafters.
        quants: quantizations that can be tried.
        processes: whether other processes can load the same model.
        cores: CPU cores; None asks the machine.
        thinks: whether the target thinks while it reads.
        requests: number of requests that a batch can have.
    """
    missing: set[tuple[str, Value]] = {("quant", quant) for quant in QUANTS if quant not in quants}
    missing |= {("threads", n) for n in (1, 2) if n >= (cores or usable_cores())}
    missing |= {("batch", n) for n in (8, 16, 64) if n > requests}
    missing |= {("drafter", name) for name in DRAFTERS if name not in drafters}
    if not thinks:
        missing |= {("speculative_prefill", ahead) for ahead in (1, 3, "auto", "whole")}
    if not processes:
        missing |= {("process", "fresh"), ("process", "resumed")}
    axes = {f.name: tuple(v for v in f.metadata["values"] if (f.name, v) not in missing) for f in fields(Setting)}
    return {name: values for name, values in axes.items() if len(values) > 1}


def consistent(values: Mapping[str, Value]) -> bool:
    """Return whether values of some axes can be combined, and all have an effect."""
    get = values.get
    drafter, neighbours, drafted = get("drafter"), get("neighbours"), get("draft_tokens")
    if get("process") == "resumed" and (  # one run, no tiny cache: what the command line offers
        drafter in ("adversary", "oracle")
        or neighbours == "broken"
        or get("prefix_cache") in ("warm", "shared")
        or (get("preemption") or get("chunk") is not None or get("chains"))  # chains are on
    ):
        return False
    return not (
        (get("chains") and drafter in ("ngram", "adversary", "oracle"))  # whose drafts need what was committed
        or (drafted is not None and drafter == "none")
        or (drafter == "self" and get("quant", "none") != "none")  # it already has few bits
        or (get("speculative_prefill", "off") != "off" and get("chunk") == 1)  # leaves nothing to read ahead
        or (get("slot") and get("batch") == 1)
        # Only batches are preempted; a cache that holds a very long prompt is too large for the others to outgrow.
        or (get("preemption") and (get("batch") == 1 or neighbours == "long"))
    )


def alone(name: str, values: Iterable[Value], batch: Value = 8) -> list[Setting]:
    """Return settings that change one axis only, in batches, beside what its values need to have an effect."""
    beside: dict[str, Any] = {"batch": batch}
    if name == "draft_tokens":
        beside["drafter"] = "adversary"
    elif name == "sampling":
        beside |= {"drafter": "ngram", "draft_tokens": 4}
    return [Setting(**{**beside, name: value}) for value in values]
