"""The settings of a run and its summary. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, Literal

from detgen.declaring import Option, Part
from detgen.engine.config import EngineConfig
from detgen.params import SamplingParams
from detgen.workers.worker_config import WorkersConfig

if TYPE_CHECKING:  # the help of the command line needs the fields alone
    from detgen.engine.engine_like import EngineLike
    from detgen.engine.request import Chunk, Completion, Request
    from detgen.engine.score_requests import Score
    from detgen.outputs import Totals
    from detgen.prompts import BadLine, Prompts


def _folder_or_auto(text: str) -> Path | str:
    """Parse a folder, or `auto`."""
    if not text:
        raise ValueError("'' is neither auto nor a folder")
    return text if text == "auto" else Path(text)


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
        echo: write the prompt with each output.
        show_thoughts: show how a thinking model read the first prompt.
        acceptance_log: how to write the log of drafted and committed tokens: plain, compressed, or not at all.
        output_format: openai also writes the results in the OpenAI batch API's format, to `results.jsonl`.
        cache: folder of a store that is also read and filled; "auto" is the user's, None uses none.
        workers: how many processes generate, and where; None for this one.
        piped: the stream to read if `prompts` is "-"; None for standard input.
    """

    PANEL: ClassVar = "Input and output"

    prompts: Annotated[
        str,
        Option("PROMPTS", positional=True, default="standard input"),
        "A .jsonl, .json, .txt (one prompt per line), .csv or .tsv file, each also as .gz or .zst, or a .parquet file;"
        " - for standard input: JSON lines, or plain text, which is one prompt; or a dataset:"
        " hf://NAME?split=test&column=prompt or a local folder.",
    ] = "-"
    output: Annotated[
        Path | None,
        Option("DIR", "--output -o", panel="Options", default="<stem>-out"),
        "Folder for outputs.jsonl, acceptance.jsonl, samples.sqlite3 and manifest.json. An unfinished run in it is"
        " resumed. - writes the lines of outputs.jsonl to standard output instead.",
    ] = None
    params: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limit: Annotated[int | None, Option("N", panel="Options", default="all"), "Run only the first N prompts."] = None
    overwrite: Annotated[bool, Option(), "Start over: delete what an earlier run wrote to the folder."] = False
    prompt_column: Annotated[
        str | None,
        Option("NAME", default="prompt or messages"),
        "The column of a table, or the key of a JSON line, that holds the prompts.",
    ] = None
    seed_per_line: Annotated[
        bool, Option(panel="Sampling"), "Derive a seed for each line from the seed and the line's id."
    ] = False
    echo: Annotated[bool, Option(), "Write the prompt with each output."] = False
    show_thoughts: Annotated[
        bool,
        Option(panel="Expert"),
        "Show how a model that thinks while it reads read the first prompt: chunks, states, thoughts.",
    ] = False
    acceptance_log: Annotated[
        Literal["jsonl", "zst", "off"],
        Option("jsonl|zst|off", panel="Expert"),
        "Write the log with a line per token to acceptance.jsonl, compressed to acceptance.jsonl.zst, or not at all.",
    ] = "jsonl"
    output_format: Annotated[
        Literal["jsonl", "openai"],
        Option("jsonl|openai"),
        "openai also writes results.jsonl, a line per request in the format of the OpenAI batch API.",
    ] = "jsonl"
    cache: Annotated[
        Path | Literal["auto"] | None,
        Option("DIR|auto", parser=_folder_or_auto, default="off"),
        "Reuse completions of earlier runs from the cache in DIR, and add new ones: nothing is generated twice."
        " DIR must be on a local disk; auto is ~/.cache/detgen. Never changes the text.",
    ] = None
    workers: WorkersConfig | None = None
    piped: BinaryIO | None = None

    def parameters(self) -> dict[str, Any]:
        """Return everything that decides the outputs besides the prompts and the model."""
        asked = {"limit": self.limit, "seed_per_line": self.seed_per_line, "echo": self.echo}
        return {**dict(self.params), **asked}

    def items(self, source: Prompts, say: Callable[[str], None], model: str) -> Iterator[Request | BadLine]:
        """Yield what to run on this model, in input order; `say` receives notices for the user."""
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
        prompts: as for a run; each has completions, or is a text to be scored as a whole.
        output: folder to write to; None is "<stem>-scores" in the current directory.
        engine: how to build the engine.
        limit: score only the first `limit` prompts; None scores all.
        overwrite: delete what an earlier run wrote to the folder.
        prompt_column: the key or column that holds the prompts or, where there are no completions, the texts, if it
            has another name than usual.
        echo: write the prompt and the completion with each score.
        workers: how many processes score, and where; None for this one.
        piped: the stream to read if `prompts` is "-"; None for standard input.
    """

    PANEL: ClassVar = "Input and output"

    prompts: Annotated[
        str,
        Option("PROMPTS", positional=True),
        "A file, standard input (-) or a dataset, as for detgen run. A line has a prompt (or messages, or"
        " prompt_token_ids) with a completion or a list of completions, or a text by itself.",
    ]
    output: Annotated[
        Path | None,
        Option("DIR", "--output -o", panel="Options", default="<stem>-scores"),
        "Folder for outputs.jsonl and manifest.json. An unfinished run in it is resumed. - writes the lines of"
        " outputs.jsonl to standard output instead.",
    ] = None
    engine: Annotated[
        EngineConfig,
        Part(
            *("target", "device", "dtype", "kv_dtype", "adapter", "target_quant"),
            *("trust_remote_code", "batch_size", "threads"),
            *("kv_memory", "prefix_cache", "speculative_prefill"),
            drafter="none",
        ),
    ] = field(default_factory=lambda: EngineConfig(drafter="none"))
    limit: Annotated[int | None, Option("N", panel="Options", default="all"), "Score only the first N prompts."] = None
    overwrite: Annotated[bool, Option(), "Start over: delete what an earlier run wrote to the folder."] = False
    prompt_column: Annotated[
        str | None,
        Option("NAME", default="prompt or messages"),
        "The column of a table, or the key of a JSON line, that holds the prompts, or texts where there are no"
        " completions.",
    ] = None
    echo: Annotated[bool, Option(), "Write the prompt and the completion, or the text, with each score."] = False
    workers: WorkersConfig | None = None
    piped: BinaryIO | None = None

    def parameters(self) -> dict[str, Any]:
        """Return everything that decides the scores besides the prompts and the model."""
        return {"limit": self.limit, "echo": self.echo}

    def items(self, source: Prompts, say: Callable[[str], None], model: str) -> Iterator[Request | BadLine]:
        """Yield what to score with this model, in input order; `say` receives notices for the user."""
        from detgen.prompts import read_scores

        return read_scores(source, self.limit, echo=self.echo, say=say)

    def stream(self, engine: EngineLike, requests: Iterable[Any]) -> Iterator[list[Score]]:
        """Score requests."""
        return engine.score_stream(requests)


@dataclass(frozen=True, slots=True)
class ThoughtCounts:
    """Counts of how a thinking model read; see `EngineStats`."""

    thoughts: int
    chunks: int
    prefill_rounds: int
    passes_saved: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        written: counts of what the folder holds.
        fresh: the part of it that this process generated; all of it if the run was already finished.
        resumed: samples that the folder had.
        reused: samples taken from the store of `cache`.
        seconds: time that this process spent generating.
        target_passes: canonical passes of this process.
        peak_memory: bytes.
        sha256: digest of `outputs.jsonl`; None if it is incomplete.
        thoughts: counts of a thinking model's thoughts in this process; None for other models.
        chunks: the first prompt's first sample as such a model read it, if asked for.
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
