"""What a peer is asked, and what it answers: plain data and a protocol.

Peers may run in environments of their own, where of all that detgen needs nothing is installed. So this module, and
each file in `detgen/bench/peers/` but detgen's and transformers', imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from detgen.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to be continued by exactly `output` tokens; end-of-sequence tokens do not end it."""

    tokens: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, their name, where they come from in words, and the temperature; at another than 0 detgen runs alone."""

    name: str
    prompts: tuple[Prompt, ...]
    origin: str
    temperature: float = 0.0

    @property
    def longest(self) -> int:
        """Positions of its longest sequence."""
        return max(len(p.tokens) + p.output for p in self.prompts)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The models that every peer runs, and on what.

    Attributes:
        engine: as in `BenchConfig`, with a device, dtype and threads that are settled. A peer in an environment of its
            own gets the same names in plain data, where `target` and `draft` are always folders.
        random_weights: as in `BenchConfig`.
        seed: of random weights.
        positions: of the longest sequence, and one to spare.
        scratch: folder for models that are written or converted on the way.
        native: whether detgen computes the target's passes by its own kernels and float32.
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
        """Whether there is a draft model to draft with."""
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
        """Whether the target is."""
        return self.engine.target_quant != "none"

    @property
    def precision(self) -> str:
        """Of weights and arithmetic, as detgen runs the target."""
        return self.engine.target_quant if self.quantized else self.engine.dtype

    @property
    def plain_precision(self) -> str:
        """As transformers runs it, which has no weights in few bits."""
        return self.engine.dtype


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a peer; each cell that it takes part in has a row of it.

    Attributes:
        peer: name of the peer.
        name: such as a drafter's or a precision's.
        precision: of weights and arithmetic.
        process: contenders of one process share it, and the models in it.
        environment: variables that the process is started with.
        most_batch: the largest batch size that it can run; None for any.
        self_checked: its rows say whether two batch sizes gave the same bytes.
        fraction: share of the requests that are verified, from 0 to 1; None where nothing ever is.
        acceptance: rate at which the synthetic drafter is right; None for real drafters.
        weights: how detgen keeps the target's, where that is not as the benchmark's settings say: a number format or
            a quantization.
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
        """How tables call it, batch size aside."""
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
    """What a peer is asked to run: all prompts at once, at most `batch_size` at a time.

    `deterministic` says which prompts are to be verified; peers that verify nothing ignore it, and all but detgen
    ignore `temperature`.
    """

    prompts: tuple[Prompt, ...]
    batch_size: int
    deterministic: tuple[bool, ...]
    temperature: float = 0.0


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
        cpu_seconds: of the peer's process and of those that it started, during `seconds`.
        precision: what the library chose, where the contender leaves it the choice.
        fewer_bits: as in `Contender`, likewise.
        weights: number format that they are kept in, where that is not the precision's.
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

    Its file imports the library only where a peer is made or runs.

    Args:
        source: the models.
        contender: one of the process; the others differ in the arguments of `run`.
        batch_sizes: all that will be asked for.
    """

    packages: ClassVar[tuple[str, ...]]
    """Distributions that have to be installed; those between which there is a choice, with | between them."""

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None: ...

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """How the library can run these models on this device, the plainest way first; empty if not at all."""
        ...

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job greedily: each prompt gets its number of tokens, end-of-sequence tokens included."""
        ...
