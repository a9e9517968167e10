"""What a benchmark is told, what a peer is asked and answers, and what a row of the results holds. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from detgen.engine.config import DTypeName, QuantName


class BenchError(Exception):
    """A benchmark that cannot be made; the message names what and the remedy."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure.

    Attributes:
        output: folder for the results.
        full: the whole grid instead of the quick one.
        workloads: names of workloads; empty for those of the grid.
        requests: requests a cell; None lets the grid choose.
        batch_sizes: batch sizes; empty for those of the grid.
        fractions: shares of requests that are verified, in percent; empty for those of the grid.
        scale: factor of the lengths of synthetic workloads; None is 1 on CUDA and 1/16 on a CPU.
        max_tokens: tokens generated a request of `sample` and `file:`.
        acceptances: rates at which a synthetic drafter is right, in (0, 1).
        peers: names of peers; empty for all that are installed.
        rounds: measured rounds a cell; None takes as many as the time allows, at least 3.
        seed: of prompts, lengths and random weights.
        target: folder or hub name of the model; None is the embedded one.
        draft: likewise the draft model.
        random_weights: a built-in configuration or a config.json to fill with random weights instead.
        device: auto, cpu, cuda or cuda:N.
        dtype: see `EngineConfig`.
        target_quant: quantization of the target by bitsandbytes.
        draft_quant: quantization of the draft model.
        threads: CPU threads of every peer; None is one a core.
        figures: draw the figures too.
        compare: a former bench.json to compare with.
    """

    output: Path = Path("bench-out")
    full: bool = False
    workloads: tuple[str, ...] = ()
    requests: int | None = None
    batch_sizes: tuple[int, ...] = ()
    fractions: tuple[float, ...] = ()
    scale: float | None = None
    max_tokens: int = 64
    acceptances: tuple[float, ...] = ()
    peers: tuple[str, ...] = ()
    rounds: int | None = None
    seed: int = 0
    target: str | None = None
    draft: str | None = None
    random_weights: str | None = None
    device: str = "auto"
    dtype: DTypeName = "auto"
    target_quant: QuantName = "none"
    draft_quant: QuantName = "none"
    threads: int | None = None
    figures: bool = False
    compare: Path | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to be continued by exactly `output` tokens; end-of-sequence tokens do not end it."""

    tokens: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, their name, and in words where they come from."""

    name: str
    prompts: tuple[Prompt, ...]
    origin: str

    @property
    def longest(self) -> int:
        """Positions that its longest sequence takes."""
        return max(len(p.tokens) + p.output for p in self.prompts)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which models every peer runs, and on what. Fields as in `BenchConfig`; further ones are:

    Attributes:
        positions: that the longest sequence takes.
        scratch: folder for models written or converted on the way.
    """

    target: str | None
    draft: str | None
    random_weights: str | None
    device: str
    dtype: DTypeName
    target_quant: QuantName
    draft_quant: QuantName
    threads: int
    seed: int
    positions: int
    scratch: Path

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model whose proposals are worth anything."""
        return self.random_weights is None and (self.draft is not None or self.target is None)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a peer.

    Attributes:
        name: such as a drafter's or a precision's.
        precision: of weights and arithmetic.
        process: variants of one process name share a process, and there models.
        environment: variables that the process is started with.
        most_batch: the largest batch size that it can run; None for any.
        self_checked: a row of it says whether two batch sizes gave the same bytes.
    """

    name: str
    precision: str
    process: str
    environment: tuple[tuple[str, str], ...] = ()
    most_batch: int | None = None
    self_checked: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One row before it is measured.

    Attributes:
        peer: name of the adapter.
        variant: how it is run.
        fraction: share of the requests that are verified, 0 to 1; None where nothing ever is.
        acceptance: rate at which a synthetic drafter is right; None for real drafters.
    """

    peer: str
    variant: Variant
    fraction: float | None = None
    acceptance: float | None = None

    @property
    def label(self) -> str:
        """How tables call it, batch size aside."""
        label = f"{self.peer} {self.variant.name}"
        if self.acceptance is not None:
            label += f" {self.acceptance:g} (synthetic)"
        if self.fraction is not None and 0 < self.fraction < 1:
            label += f", {self.fraction:.0%} verified"
        return label


@dataclass(frozen=True, slots=True)
class Job:
    """What a peer is asked to run: all prompts at once, at most `batch_size` at a time.

    Attributes:
        deterministic: which prompts are to be verified; peers that verify nothing ignore it.
        acceptance: see `Setting`.
    """

    prompts: tuple[Prompt, ...]
    batch_size: int
    deterministic: tuple[bool, ...]
    acceptance: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a peer made of a job.

    Attributes:
        tokens: generated token ids of each prompt.
        seconds: from the first request's submission to the last token.
        first: seconds from the start to each prompt's first token.
        last: seconds from the start to each prompt's last token.
        passes: passes of the target model; None where the peer does not tell.
        counts: further counts: of drafts, of rows.
        memory: peak bytes of the peer's process during the job; GPU memory in `gpu_memory`.
    """

    tokens: list[list[int]]
    seconds: float
    first: list[float]
    last: list[float]
    passes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    memory: int | None = None
    gpu_memory: int | None = None


class Peer(Protocol):
    """One library beside which detgen is measured. Its file imports the library in `load` alone.

    Attributes:
        name: as on the command line.
        packages: distributions that have to be installed.
    """

    name: str
    packages: tuple[str, ...]

    def variants(self, source: ModelSource) -> list[Variant]:
        """How it can be run with these models on this device, plain ones first; empty if not at all.

        Called in the parent process, where the library is not imported.
        """
        ...

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Get ready to run a variant at these batch sizes; called once a variant, in its process."""
        ...

    def run(self, variant: Variant, job: Job) -> Outcome:
        """Run a job, greedily, each prompt to its number of tokens whatever the tokens are."""
        ...


class Observer(Protocol):
    """Who is told how a benchmark is going."""

    def message(self, text: str) -> None:
        """Something worth a line."""
        ...

    def progress(self, done: int, total: int, what: str, seconds_left: float | None) -> None:
        """`done` of `total` runs are over and `what` is next."""
        ...


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
