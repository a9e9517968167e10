"""What a benchmark finds: rows, and all of them together with what they were measured on. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Row:
    """One setting in one cell, measured.

    Lists hold one entry a measured round. Ratios are of the same round's runs.

    Attributes:
        workload: name of the workload.
        batch_size: most requests at a time.
        peer: who ran it.
        label: the peer with its variant.
        precision: of weights and arithmetic.
        synthetic: whether the drafts were made to be accepted at a stated rate.
        fraction: share of requests that are verified.
        requests: how many.
        prompt_tokens: of all requests together.
        output_tokens: of all requests together.
        error: why there are no measurements; the lists are empty then.
        wrong: what is wrong with its outputs; None if nothing was found.
        seconds: one run.
        ttft: p50 and p99 of the time to first token, in seconds.
        tpot: p50 and p99 of the time per output token behind the first, in seconds.
        over_fast: speed over that of detgen's unverified fast path in the same round.
        over_transformers: speed over the fastest transformers row of the same round.
        passes: passes of the target model in one run.
        counts: see `Outcome`; of the last run.
        same_bytes: prompts whose tokens two batch sizes gave alike, of how many, and the other batch size.
        agreement: prompts whose tokens equal the reference's, of how many.
        memory: peak bytes of the peer's process.
        gpu_memory: peak bytes on the GPU.
        bandwidth_share: weight bytes read over what a copy moves in the time.
        arithmetic_share: useful arithmetic over what a matrix product does in the time.
    """

    workload: str
    batch_size: int
    peer: str
    label: str
    precision: str
    synthetic: bool
    fraction: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    wrong: str | None = None
    seconds: list[float] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)
    tpot: list[tuple[float, float]] = field(default_factory=list)
    over_fast: list[float] = field(default_factory=list)
    over_transformers: list[float] = field(default_factory=list)
    passes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    same_bytes: tuple[int, int, int] | None = None
    agreement: tuple[int, int] | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    bandwidth_share: float | None = None
    arithmetic_share: float | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """What names the row in any run of the same benchmark."""
        return self.workload, self.batch_size, self.label

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second of each round."""
        return [self.output_tokens / s for s in self.seconds]


@dataclass(slots=True)
class Results:
    """A whole benchmark.

    Attributes:
        environment: machine, versions, models, settings.
        roofline: bytes a second of a copy, operations a second of a matrix product.
        workloads: names, and where they come from.
        rows: in the order in which they were measured.
        notes: what was left out and why.
    """

    environment: dict[str, Any]
    roofline: dict[str, float]
    workloads: dict[str, str]
    rows: list[Row]
    notes: list[str]
