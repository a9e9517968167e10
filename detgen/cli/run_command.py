"""`detgen run`: a prompt file in, a folder of outputs out.

What a run does is in `detgen.run`, how it looks in `detgen.show`. The command imports both when it is called, since
they bring torch and rich, and `--help` works without them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from detgen.cli import options

if TYPE_CHECKING:
    from detgen.run import RunSummary
    from detgen.show.progress_view import QuietDisplay

EPILOG = "\n".join(
    (
        "Examples:",
        "  [bold]detgen run prompts.jsonl[/]",
        "  [bold]detgen run prompts.jsonl -o out --max-tokens 200 --temperature 0.8 --seed 7[/]",
        "  [bold]detgen run chats.jsonl --target models/large --draft models/small[/]",
        "  [bold]zcat prompts.jsonl.gz | detgen run - -o out --stop $'\\n\\n'[/]",
        "",
        "Exit status: 0 done, 1 no prompt could be run (with --strict: some could not), 2 refused, 70 internal error,"
        " 130 interrupted.",
    )
)

sampling_option = partial(typer.Option, rich_help_panel="Sampling")


def run_command(
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            show_default=False,
            help="A .jsonl, .json, .txt (one prompt per line), .csv or .tsv file, each also as .gz or .zst, or a"
            " .parquet file; - for JSON lines on stdin; or a dataset: hf://NAME?split=test&column=prompt or a local"
            " folder.",
        ),
    ],
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    target_quant: options.TargetQuant = "none",
    draft_quant: options.DraftQuant = "none",
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    draft_tokens: options.DraftTokens = None,
    max_tokens: Annotated[int, sampling_option(metavar="N", help="Most tokens to generate per sample.")] = 128,
    min_tokens: Annotated[int, sampling_option(metavar="N", help="Do not end a sample before so many tokens.")] = 0,
    temperature: Annotated[
        float,
        sampling_option(metavar="T", help="0 always takes the most likely token; 1 samples as the model predicts."),
    ] = 0.0,
    top_p: Annotated[
        float,
        sampling_option(metavar="P", help="Keep the most likely tokens that together have probability P; 1 is off."),
    ] = 1.0,
    top_k: Annotated[int, sampling_option(metavar="K", help="Keep the K most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[
        float, sampling_option(metavar="P", help="Drop tokens less likely than P times the most likely one; 0 is off.")
    ] = 0.0,
    seed: Annotated[int, sampling_option(metavar="N", help="Another seed gives another sample.")] = 0,
    seed_per_line: Annotated[
        bool, sampling_option("--seed-per-line", help="Derive a seed for each line from the seed and the line's id.")
    ] = False,
    n: Annotated[int, sampling_option("--n", metavar="N", help="Samples per prompt.")] = 1,
    stop: Annotated[
        list[str] | None,
        sampling_option(
            metavar="TEXT",
            show_default=False,
            help="End the text before TEXT; may be given several times. Taken literally: write a newline as $'\\n'.",
        ),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        sampling_option(
            "--stop-token-id",
            metavar="ID",
            min=0,
            show_default=False,
            help="End the text before the token of this id; may be given several times.",
        ),
    ] = None,
    ignore_eos: Annotated[bool, sampling_option(help="Go on after a token that ends a text, up to the limit.")] = False,
    repetition_penalty: Annotated[
        float,
        sampling_option(metavar="P", help="Divide logits of tokens of prompt and text by P; 1 is off."),
    ] = 1.0,
    frequency_penalty: Annotated[
        float, sampling_option(metavar="P", help="Take P off a logit for each time that the text has the token.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, sampling_option(metavar="P", help="Take P off the logits of tokens that the text has.")
    ] = 0.0,
    logprobs: Annotated[
        int | None,
        sampling_option(
            metavar="N",
            show_default=False,
            help="Write the log-probabilities of each token and of the N most likely ones.",
        ),
    ] = None,
    deterministic: Annotated[
        bool, sampling_option(help="Verify each token; --no-deterministic is decoded once, without the guarantee.")
    ] = True,
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
            show_default="<stem>-out",
            help="Folder for outputs.jsonl, acceptance.jsonl, requests.jsonl and manifest.json. An unfinished run in"
            " it is resumed.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        options.run_option(
            metavar="NAME",
            show_default="prompt or messages",
            help="The column of a table, or the key of a JSON line, that holds the prompts.",
        ),
    ] = None,
    output_format: Annotated[
        Literal["jsonl", "openai"],
        options.run_option(
            metavar="jsonl|openai",
            help="openai also writes results.jsonl, a line per request as the OpenAI batch API has it.",
        ),
    ] = "jsonl",
    cache: Annotated[
        Path | None,  # or "auto"
        options.run_option(
            parser=options.parse_cache,
            metavar="DIR|auto",
            show_default="off",
            help="Take completions that an earlier run made from the cache in DIR, and add what this one makes: nothing"
            " is generated twice. DIR must be on a local disk; auto is ~/.cache/detgen. Never changes the text.",
        ),
    ] = None,
    echo: Annotated[bool, options.run_option("--echo", help="Write the prompt beside each output.")] = False,
    show_thoughts: Annotated[
        bool,
        options.run_option(
            "--show-thoughts",
            help="Show how a model that thinks while it reads took in the first prompt: chunks, states, thoughts.",
        ),
    ] = False,
    limit: options.Limit = None,
    overwrite: options.Overwrite = False,
    strict: Annotated[bool, options.run_option("--strict", help="Exit with 1 if any prompt could not be run.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Generate text for every prompt of a file.

    A line's own settings (max_tokens, temperature, ...) override the options.
    A line that cannot be run becomes an error in the output; the rest run.
    """
    from detgen.engine.config import EngineConfig
    from detgen.errors import EngineError, RequestError, RunError
    from detgen.params import SamplingParams
    from detgen.show.progress_view import open_display
    from detgen.workers.worker_config import workers_config

    display = open_display(quiet=quiet)
    summary = None
    try:
        with display:
            from detgen.run import RunConfig, run

            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                seed=seed,
                n=n,
                stop=tuple(stop or ()),
                stop_token_ids=tuple(stop_token_ids or ()),
                ignore_eos=ignore_eos,
                repetition_penalty=repetition_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                logprobs=logprobs,
                deterministic=deterministic,
            )
            engine = EngineConfig(
                target=target,
                draft=draft,
                drafter=drafter,
                draft_tokens=draft_tokens,
                batch_size=batch_size,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                draft_quant=draft_quant,
                threads=threads,
                kv_memory=kv_memory,
                prefix_cache=prefix_cache == "on",
                speculative_prefill=speculative_prefill,  # type: ignore[arg-type]
                trust_remote_code=trust_remote_code,
            )
            config = RunConfig(
                prompts,
                output,
                params,
                engine,
                limit,
                overwrite,
                prompt_column=prompt_column,
                seed_per_line=seed_per_line,
                echo=echo,
                show_thoughts=show_thoughts,
                output_format=output_format,
                cache=cache,
                workers=workers_config(workers, ray),
            )
            summary = run(config, display)
    except (EngineError, RequestError, RunError) as error:
        display.error(options.as_typed(error))
        raise typer.Exit(options.REFUSED) from None
    except KeyboardInterrupt:
        pass  # ends as an interruption of the generation does
    conclude(summary, display, quiet=quiet, strict=strict)


def conclude(summary: RunSummary | None, display: QuietDisplay, *, quiet: bool, strict: bool) -> None:
    """Show how a run ended; no summary is an interruption.

    Raises:
        typer.Exit: with the status, unless it is 0.
    """
    if summary is None or summary.status == "interrupted":
        display.notice("interrupted. What was finished is kept; to resume, run the same command again:")
        display.console.print(f"  {options.same_command()}", soft_wrap=True, markup=False)
        raise typer.Exit(options.INTERRUPTED)

    from detgen.show.run_view import failures, print_summary

    if not quiet:
        print_summary(summary)
    for line in failures(summary):
        display.notice(line)
    if summary.written.errors and (strict or summary.all_failed):
        raise typer.Exit(options.FAILED)
