"""`detgen score`: a file of prompts and completions in, a folder of log-probabilities out.

What it does is in `detgen.run`, with which a run shares all but the lines and what the engine is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from detgen.cli import options
from detgen.cli.run_command import conclude

EPILOG = "\n".join(
    (
        "Examples:",
        "  [bold]detgen score questions.jsonl[/]",
        "  [bold]detgen score questions.jsonl -o scores --target models/large[/]",
        "  [bold]detgen score 'hf://NAME?split=test&column=text'[/]",
        "",
        "Exit status: 0 done, 1 no prompt could be scored (with --strict: some could not), 2 refused, 70 internal"
        " error, 130 interrupted.",
    )
)


def score_command(
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            show_default=False,
            help="A file, standard input or a dataset, as for detgen run. A line has a prompt (or messages, or"
            " prompt_token_ids) with a completion or a list of completions, or a text by itself.",
        ),
    ],
    target: Annotated[
        str | None,
        options.model_option(
            "--target",
            "--model",
            metavar="MODEL",
            show_default="the embedded one",
            help="The model that scores: a folder, a GGUF file, a Hugging Face name, or demo-thinking, the embedded one"
            " that thinks while it reads.",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    target_quant: options.TargetQuant = "none",
    trust_remote_code: options.TrustRemoteCode = False,
    batch_size: options.BatchSize = 16,
    threads: options.Threads = None,
    workers: options.Workers = None,
    ray: options.Ray = None,
    kv_memory: options.KvMemory = None,
    prefix_cache: options.PrefixCache = "on",
    speculative_prefill: options.SpeculativePrefill = "auto",
    output: Annotated[
        Path | None,
        options.run_option(
            "--output",
            "-o",
            callback=options.named,
            metavar="DIR",
            show_default="<stem>-scores",
            help="Folder for outputs.jsonl and manifest.json. An unfinished run in it is resumed.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        options.run_option(
            metavar="NAME",
            show_default="prompt or messages",
            help="The column of a table, or the key of a JSON line, that holds the prompts, or texts where there are no"
            " completions.",
        ),
    ] = None,
    echo: Annotated[
        bool, options.run_option("--echo", help="Write prompt and completion, or the text, beside each score.")
    ] = False,
    limit: options.Limit = None,
    overwrite: options.Overwrite = False,
    strict: Annotated[
        bool, options.run_option("--strict", help="Exit with 1 if any prompt could not be scored.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the log-probabilities of given completions, or of whole texts, token by token and in sum.

    A line that cannot be scored becomes an error in the output; the rest are scored.
    """
    from detgen.engine.config import EngineConfig
    from detgen.errors import EngineError, RequestError, RunError
    from detgen.show.progress_view import open_display
    from detgen.workers.worker_config import workers_config

    display = open_display(quiet=quiet)
    summary = None
    try:
        with display:
            from detgen.run import ScoreConfig, run

            engine = EngineConfig(
                target=target,
                drafter="none",
                batch_size=batch_size,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                threads=threads,
                kv_memory=kv_memory,
                prefix_cache=prefix_cache == "on",
                speculative_prefill=speculative_prefill,  # type: ignore[arg-type]
                trust_remote_code=trust_remote_code,
            )
            asked = workers_config(workers, ray)
            summary = run(ScoreConfig(prompts, output, engine, limit, overwrite, prompt_column, echo, asked), display)
    except (EngineError, RequestError, RunError) as error:
        display.error(options.as_typed(error))
        raise typer.Exit(options.REFUSED) from None
    except KeyboardInterrupt:
        pass  # ends as an interruption of the reading does
    conclude(summary, display, quiet=quiet, strict=strict)
