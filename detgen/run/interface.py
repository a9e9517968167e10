"""What a run is given, what it returns, and what it needs of an engine. Plain data and a protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from detgen.engine.chunks import Chunk
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request, SamplingParams
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import EngineStats
from detgen.outputs import Totals
from detgen.prompts import BadLine, Prompts, read_scores
from detgen.workers.worker_config import WorkersConfig


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What to run.

    Attributes:
        prompts: path, "-" for JSON lines on standard input, or "hf://...".
        output: folder to write to; None is "<stem>-out" in the current directory.
        params: the defaults of prompts that set no parameters of their own.
        engine: how to build the engine.
        limit: run only the first `limit` prompts; None runs all.
        overwrite: delete what an earlier run wrote to the folder.
        prompt_column: the key or column that holds the prompts, if it has another name than usual.
        seed_per_line: derive a seed for each prompt that sets none, from `params.seed` and its id.
        echo: write the prompt beside each output.
        show_thoughts: show how a thinking model read the first prompt.
        output_format: openai also writes the results as the OpenAI batch API does, to `results.jsonl`.
        cache: folder of a store that is also asked and filled; "auto" is the user's, None uses none.
        workers: how many processes generate, and where; None for this one.
    """

    prompts: str
    output: Path | None
    params: SamplingParams
    engine: EngineConfig
    limit: int | None = None
    overwrite: bool = False
    prompt_column: str | None = None
    seed_per_line: bool = False
    echo: bool = False
    show_thoughts: bool = False
    output_format: Literal["jsonl", "openai"] = "jsonl"
    cache: Path | Literal["auto"] | None = None
    workers: WorkersConfig | None = None

    def parameters(self) -> dict[str, Any]:
        """Whatever decides the outputs beside the prompts and the model."""
        asked = {"limit": self.limit, "seed_per_line": self.seed_per_line, "echo": self.echo}
        return {**asdict(self.params), **asked}

    def items(self, source: Prompts, say: Callable[[str], None], model: str) -> Iterator[Request | BadLine]:
        """What there is to run, in input order, on this model; `say` is told what a person should hear of it."""
        return source.read(
            self.params, self.limit, echo=self.echo, seed_per_line=self.seed_per_line, say=say, model=model
        )

    def stream(self, engine: EngineLike, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Run requests."""
        return engine.stream(requests)


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """What to score.

    Attributes:
        prompts: as those of a run; each has completions, or is a text to be scored as a whole.
        output: folder to write to; None is "<stem>-scores" in the current directory.
        engine: how to build the engine.
        limit: score only the first `limit` prompts; None scores all.
        overwrite: delete what an earlier run wrote to the folder.
        prompt_column: the key or column that holds the prompts or, where there are no completions, the texts, if it
            has another name than usual.
        echo: write prompt and completion beside each score.
        workers: how many processes score, and where; None for this one.
    """

    prompts: str
    output: Path | None
    engine: EngineConfig
    limit: int | None = None
    overwrite: bool = False
    prompt_column: str | None = None
    echo: bool = False
    workers: WorkersConfig | None = None

    def parameters(self) -> dict[str, Any]:
        """Whatever decides the scores beside the prompts and the model."""
        return {"limit": self.limit, "echo": self.echo}

    def items(self, source: Prompts, say: Callable[[str], None], model: str) -> Iterator[Request | BadLine]:
        """What there is to score, in input order, by this model; `say` is told what a person should hear of it."""
        return read_scores(source, self.limit, echo=self.echo, say=say)

    def stream(self, engine: EngineLike, requests: Iterable[Any]) -> Iterator[list[Score]]:
        """Score requests."""
        return engine.score_stream(requests)


@dataclass(frozen=True, slots=True)
class ThoughtCounts:
    """Counts of a thinking model's reading; see `EngineStats`."""

    thoughts: int
    chunks: int
    prefill_rounds: int
    passes_saved: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        written: what the folder holds.
        fresh: the part of it that this process generated; all of it if the run was finished already.
        resumed: samples that the folder had.
        reused: samples taken from the store of `cache`.
        seconds: time this process spent generating.
        target_passes: canonical passes of this process.
        peak_memory: bytes.
        sha256: digest of `outputs.jsonl`; None if it is incomplete.
        thoughts: what a thinking model thought in this process; None for other models.
        chunks: the first prompt's first sample as such a model read it, if that was asked for.
        results: digest of `results.jsonl`; None if there is none.
    """

    status: Literal["finished", "interrupted", "already finished"]
    output: Path
    written: Totals
    fresh: Totals
    resumed: int
    seconds: float
    target_passes: int
    peak_memory: int
    sha256: str | None
    thoughts: ThoughtCounts | None = None
    chunks: tuple[Chunk, ...] = ()
    results: str | None = None
    reused: int = 0

    @property
    def all_failed(self) -> bool:
        """Whether no prompt of the run could be run."""
        return self.written.prompts > 0 and self.written.errors > 0 and not self.written.tokens


class EngineLike(Protocol):
    """What a run needs of `detgen.engine.Engine`."""

    @property
    def stats(self) -> EngineStats:
        """Running totals."""

    @property
    def thinks(self) -> bool:
        """Whether the model thinks while it reads."""

    @property
    def dated(self) -> bool:
        """Whether the text of a chat has the day in it."""

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """The request's prompt and the tokens of a completion in chunks, with thoughts by first position."""

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Run requests, read as slots become free; yields after each step what finished in it."""

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        """Score requests, likewise."""

    def profile(self) -> dict[str, Any]:
        """Everything that decides the bits of an output."""

    def draft_profile(self) -> dict[str, Any] | None:
        """The draft model, which decides none of them; None without one."""
