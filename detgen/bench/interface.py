"""What a benchmark is told, what a peer is asked, and what it answers. Plain data and protocols."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from detgen.errors import DTypeName, QuantName


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
        scale: factor of the lengths of synthetic workloads; None is 1 on CUDA and 1/16 on a CPU, less for a short
            context.
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
        positions: that the longest sequence takes, and one to spare.
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
            label += f" {self.acceptance:g}"
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
        first: seconds from the start to each prompt's first token; None where the time was not taken.
        last: likewise to its last token.
        passes: passes of the target model; None where the peer does not tell.
        counts: further counts: of drafts, of rows.
        memory: peak bytes of the peer's process during the job; GPU memory in `gpu_memory`.
        precision: what the library chose, where the variant leaves it the choice.
    """

    tokens: list[list[int]]
    seconds: float
    first: list[float | None]
    last: list[float | None]
    passes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    memory: int | None = None
    gpu_memory: int | None = None
    precision: str | None = None


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
