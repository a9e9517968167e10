"""What a benchmark is told, what a peer is asked, and what it answers. Plain data and protocols."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from detgen.declaring import Option, Part
from detgen.engine.config import EngineConfig


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 1,4") from None


def _numbers(text: str) -> tuple[float, ...]:
    """Likewise, with fractions."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers such as 0.5,20") from None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure.

    Attributes:
        engine: models, quantization, device, dtype and threads of every peer; its other fields are ignored.
        random_weights: a built-in configuration or a config.json, filled with random weights in place of models.
        output: folder for the results.
        full: the whole grid instead of the quick one.
        workloads: names of workloads; empty for those of the grid.
        requests: requests per cell; None lets the grid choose.
        batch_sizes: batch sizes; empty for those of the grid.
        fractions: shares of requests that are verified, in percent; empty for those of the grid.
        scale: factor of the lengths of synthetic workloads; None is 1 on CUDA and 1/16 on a CPU, less for a short
            context.
        max_tokens: tokens generated per request of `sample` and `file:`.
        acceptances: rates at which a synthetic drafter is right, in (0, 1).
        peers: names of peers; empty for all that are installed.
        rounds: measured rounds per cell; None takes as many as the time allows, at least 3.
        seed: of prompts, lengths and random weights.
        figures: draw the figures too.
    """

    PANEL: ClassVar = "Workload"

    engine: Annotated[
        EngineConfig,
        Part("target", "draft", "device", "dtype", "target_quant", "draft_quant", "trust_remote_code", "threads"),
    ] = field(default_factory=EngineConfig)
    random_weights: Annotated[
        str | None,
        Option("CONFIG", panel="Model"),
        "Random weights instead of models: llama-3.1-8b, llama-3.2-1b, qwen3-0.6b, qwen2.5-0.5b, llama-135m,"
        " llama-89m, llama-29m, tiny, or the path of a config.json.",
    ] = None
    output: Annotated[Path, Option("DIR", "--output -o", panel="Options"), "Folder for bench.json and bench.md."] = (
        Path("bench-out")
    )
    full: Annotated[
        bool, Option(None, "--full/--quick", panel="Options"), "The whole grid, or what fits in three minutes."
    ] = False
    workloads: Annotated[
        tuple[str, ...],
        Option("NAME", "--workload", panel="Options", default="sample; all with --full"),
        "What is generated; may be given several times.",
    ] = ()
    requests: Annotated[int | None, Option("N", default="two batches"), "Requests at each batch size."] = None
    batch_sizes: Annotated[
        tuple[int, ...],
        Option("LIST", "--batch-size", panel="Options", parser=_whole_numbers, default="16,1; 1,4,16,32 with --full"),
        "Most requests at a time.",
    ] = ()
    fractions: Annotated[
        tuple[float, ...],
        Option("LIST", "--deterministic-fraction", parser=_numbers, default="100; 2,5,10,20,50,100 with --full"),
        "Percentages of requests that are verified, for none and auto; the rest run unverified.",
    ] = ()
    scale: Annotated[
        float | None,
        Option("F", default="1 on CUDA, else 1/16; less for a short context"),
        "Factor of the lengths of random prompts.",
    ] = None
    max_tokens: Annotated[int, Option("N", panel="Options"), "Tokens per request of sample and file:."] = 64
    acceptances: Annotated[
        tuple[float, ...],
        Option("RATES", "--synthetic-acceptance", parser=_numbers, default="none"),
        "Also measure a drafter that is right at these rates, such as 0.5,0.7,0.9, at the cost of a draft model. Its"
        " rows are labelled synthetic.",
    ] = ()
    peers: Annotated[
        tuple[str, ...],
        Option("NAME", "--peer", panel="Options", default="all that are installed"),
        "Measure only this peer, in each of its precisions: detgen, transformers, transformers-assisted,"
        " transformers-continuous, openvino, llama.cpp, vllm, sglang; may be given several times.",
    ] = ()
    rounds: Annotated[
        int | None,
        Option("N", default="3 to 7, as time allows"),
        "Measured runs of each row; more runs give a better estimate of the spread, which --compare uses.",
    ] = None
    seed: Annotated[int, Option("N"), "Of random prompts, lengths and weights."] = 0
    figures: Annotated[bool, Option(panel="Input and output"), "Also measure and draw the figures (detgen[plots])."] = (
        False
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to be continued by exactly `output` tokens; end-of-sequence tokens do not end it."""

    tokens: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, their name, in words where they come from, and the temperature, which is not 0 for detgen alone."""

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
        engine: as in `BenchConfig`, with a device, dtype and threads that are settled.
        random_weights: as in `BenchConfig`.
        seed: of random weights.
        positions: of the longest sequence, and one to spare.
        scratch: folder for models that are written or converted on the way.
        native: whether detgen computes the target's passes by its own kernels and float32.
        as_stored: whether detgen keeps weights that are stored in 16 bits as they are, and widens them when it reads
            them.
        random_draft: draft with random weights, too; such drafts cost what a draft model costs, and are never right.
    """

    engine: EngineConfig
    random_weights: str | None
    seed: int
    positions: int
    scratch: Path
    native: bool = False
    as_stored: bool = False
    random_draft: bool = False

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model to draft with."""
        if self.random_weights is not None:
            return self.random_draft
        return self.engine.draft is not None or self.engine.target is None

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
        """As transformers runs it, which knows nothing of weights in few bits."""
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
        fewer_bits: whether weights, arithmetic or cache have fewer bits than the model as it comes.
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
    """One library beside which detgen is measured, loaded for the contenders of one process.

    Its file imports the library only where a peer is made or runs.

    Args:
        source: the models.
        contender: one of the process; the others differ in what `run` is told.
        batch_sizes: all that will be asked for.
    """

    packages: ClassVar[tuple[str, ...]]
    """Distributions that have to be installed."""

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None: ...

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """How the library can run these models on this device, the plainest way first; empty if not at all."""
        ...

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job greedily: each prompt gets its number of tokens, end-of-sequence tokens included."""
        ...
