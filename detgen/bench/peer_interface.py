"""The interface of peers: plain data and a protocol.

Peers may run in their own environments, where nothing that detgen needs is installed. So this module, and each file in
`detgen/bench/peers/` except detgen's and transformers', imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from detgen.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue by exactly `output` tokens; end-of-sequence tokens do not end it."""

    tokens: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, with a name, their origin in words, and a temperature; at any other than 0, only detgen runs."""

    name: str
    prompts: tuple[Prompt, ...]
    origin: str
    temperature: float = 0.0

    @property
    def longest(self) -> int:
        """Number of positions of its longest sequence."""
        return max(len(p.tokens) + p.output for p in self.prompts)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The models that every peer runs, and the settings for them.

    Attributes:
        engine: as in `BenchConfig`, with device, dtype and threads decided. A peer in its own environment gets the same
            names as plain data, where `target` and `draft` are always folders.
        random_weights: as in `BenchConfig`.
        seed: seed of random weights.
        positions: positions of the longest sequence, plus one.
        scratch: folder for models that are written or converted for peers.
        native: whether detgen computes the target's passes with its own kernels and in float32.
        as_stored: whether detgen keeps weights that are stored in 16 bits as they are, and widens them when it reads
            them.
    """

    engine: EngineConfig
    random_weights: str | None
    seed: int
    positions: int
    scratch: Path
    native: bool = False
    as_stored: bool = False

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model."""
        return self.random_weights is None and (self.engine.draft is not None or self.engine.target is None)

    @property
    def on_gpu(self) -> bool:
        """Whether the models run on a CUDA device."""
        return self.engine.device.startswith("cuda")

    @property
    def threads(self) -> int:
        """CPU threads of each peer."""
        assert self.engine.threads is not None
        return self.engine.threads

    @property
    def quantized(self) -> bool:
        """Whether the target is quantized."""
        return self.engine.target_quant != "none"

    @property
    def precision(self) -> str:
        """Precision of weights and arithmetic when detgen runs the target."""
        return self.engine.target_quant if self.quantized else self.engine.dtype

    @property
    def plain_precision(self) -> str:
        """The same for transformers, which has no weights in few bits."""
        return self.engine.dtype


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a peer; it has a row in each cell that it takes part in.

    Attributes:
        peer: name of the peer.
        name: name of this way, such as that of a drafter or a precision.
        precision: precision of weights and arithmetic.
        process: name of the process; contenders with the same name share it, and the models in it.
        environment: variables that the process is started with.
        most_batch: largest batch size that it can run; None for any.
        self_checked: whether its rows say if two batch sizes gave the same bytes.
        fraction: share of the requests that are verified, from 0 to 1; None if the peer verifies nothing.
        acceptance: rate at which the synthetic drafter is right; None for real drafters.
        weights: number format or quantization in which detgen keeps the target's weights, if it differs from the
            benchmark's settings.
        fewer_bits: whether weights, arithmetic or cache have fewer bits than the stored model.
        quick: whether the quick grid has a row of it.
    """

    peer: str
    name: str
    precision: str
    process: str
    environment: tuple[tuple[str, str], ...] = ()
    most_batch: int | None = None
    self_checked: bool = False
    fraction: float | None = None
    acceptance: float | None = None
    weights: str | None = None
    fewer_bits: bool = False
    quick: bool = True

    @property
    def label(self) -> str:
        """Its name in tables, without the batch size."""
        label = f"{self.peer} {self.name}"
        if self.weights is not None:
            label += f", {self.weights}"
        if self.acceptance is not None:
            label += f" {self.acceptance:g}"
        if self.fraction is not None and 0 < self.fraction < 1:
            label += f", {self.fraction:.0%} verified"
        return label

    @property
    def reference(self) -> str:
        """Label of the row whose tokens verified requests must have."""
        return "detgen none" if self.weights is None else f"detgen none, {self.weights}"


@dataclass(frozen=True, slots=True)
class Job:
    """A job for a peer: all prompts at once, at most `batch_size` at a time.

    `deterministic` says which prompts are verified; peers that verify nothing ignore it, and all except detgen ignore
    `temperature`.
    """

    prompts: tuple[Prompt, ...]
    batch_size: int
    deterministic: tuple[bool, ...]
    temperature: float = 0.0


@dataclass(slots=True)
class Outcome:
    """The result of a job.

    Attributes:
        tokens: generated token ids of each prompt.
        seconds: time from the submission of the first request to the last token.
        first: seconds from the start to each prompt's first token; None if not measured.
        last: seconds from the start to each prompt's last token; None if not measured.
        passes: passes of the target model; None if the peer does not tell.
        counts: further counts: of drafts, of rows.
        memory: peak bytes of the peer's process during the job, without GPU memory, which is in `gpu_memory`.
        cpu_seconds: processor time of the peer's process and the processes that it started, during `seconds`.
        precision: the library's choice, if the contender leaves it to the library.
        fewer_bits: as in `Contender`, if the library chooses the precision.
        weights: number format of the weights, if it differs from the precision.
    """

    tokens: list[list[int]]
    seconds: float
    first: list[float | None]
    last: list[float | None]
    passes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    memory: int | None = None
    gpu_memory: int | None = None
    cpu_seconds: float | None = None
    precision: str | None = None
    fewer_bits: bool | None = None
    weights: str | None = None


class Peer(Protocol):
    """A library that detgen is compared with, loaded for the contenders of one process.

    Its file imports the library only when a peer is made or runs.

    Args:
        source: the models.
        contender: one of the process's contenders; the others differ in the arguments of `run`.
        batch_sizes: all batch sizes that will be asked for.
    """

    packages: ClassVar[tuple[str, ...]]
    """Distributions that have to be installed; | separates alternatives."""

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None: ...

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return the ways to run these models on this device, the plainest first; empty if there is none."""
        ...

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job greedily: each prompt gets its number of tokens, whether or not the sequence ends before."""
        ...
