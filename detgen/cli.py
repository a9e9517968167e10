"""The command line: parse, call, show.

It knows options and exit codes. What a run does is in `detgen.run`, how it looks in `detgen.display`; both are imported
inside the command, since they bring torch and rich, and `--help` answers without them.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from detgen import __version__
from detgen.engine.config import DrafterName, DTypeName, QuantName

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

_UNITS = {"": 1} | {
    letter.lower() + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}

app = typer.Typer(
    name="detgen",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; it ends the process."""
    app(prog_name="detgen")


def parse_size(text: str) -> int:
    """Bytes from `4GiB`, `500MB`, `2.5g` (as GiB) or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match and _UNITS.get("" if match[2] == "b" else match[2])
    size = round(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as 4GiB, 500MB or 1073741824")
    return size


def parse_draft_tokens(text: str) -> int | None:
    """A number of tokens, or None for `auto`."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a whole number of at least 1")
    return int(text)


def parse_device(text: str) -> str:
    """A device by torch's name, or `auto`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text!r} is not one of auto, cpu, cuda, cuda:N (N a number)")
    return text


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"detgen {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: [bold]detgen run prompts.jsonl -o out --max-tokens 200[/]")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Batch text generation that writes the same bytes every time.

    Whatever the batch size, the order of the prompts, the draft model, the number of threads, or a crash and a resume.
    """


@app.command(
    "run",
    no_args_is_help=True,
    epilog="\n".join(
        (
            "Examples:",
            "  [bold]detgen run prompts.jsonl[/]",
            "  [bold]detgen run prompts.jsonl -o out --max-tokens 200 --temperature 0.8 --seed 7[/]",
            "  [bold]detgen run chats.jsonl --target models/large --draft models/small[/]",
            "  [bold]zcat prompts.jsonl.gz | detgen run - -o out --stop $'\\n\\n'[/]",
            "",
            "Exit status: 0 done, 1 some prompts failed (--strict), 2 refused, 130 interrupted.",
        )
    ),
)
def run_command(
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            show_default=False,
            help="A .jsonl (also .gz, .zst), .json, .txt (a prompt a line), .csv or .parquet file; - for JSON lines on"
            " standard input; or a dataset, as hf://NAME?split=test&column=prompt or a local folder.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default="the embedded one",
            rich_help_panel="Models",
            help="The model whose text is wanted: a folder or a Hugging Face name.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default="the embedded one with the embedded target, else none",
            rich_help_panel="Models",
            help="A smaller model with the same vocabulary that proposes tokens. Never changes the text.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            parser=parse_device, metavar="auto|cpu|cuda|cuda:N", rich_help_panel="Models", help="Where the models run."
        ),
    ] = "auto",
    dtype: Annotated[
        DTypeName,
        typer.Option(
            metavar="TYPE",
            rich_help_panel="Models",
            help="float32, bfloat16, float16 or auto: float32 on a CPU, the checkpoint's own on CUDA.",
        ),
    ] = "auto",
    target_quant: Annotated[
        QuantName,
        typer.Option(
            metavar="none|nf4|int8", rich_help_panel="Models", help="Quantize the target model by bitsandbytes."
        ),
    ] = "none",
    draft_quant: Annotated[
        QuantName,
        typer.Option(
            metavar="none|nf4|int8", rich_help_panel="Models", help="Quantize the draft model by bitsandbytes."
        ),
    ] = "none",
    drafter: Annotated[
        DrafterName,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Drafting",
            help="Who proposes tokens: model (--draft), self (the target's own fast path), ngram (repeats in the text),"
            " none, or auto, which chooses while it runs. Never changes the text.",
        ),
    ] = "auto",
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            parser=parse_draft_tokens,
            metavar="N|auto",
            show_default="auto",
            rich_help_panel="Drafting",
            help="Tokens proposed a round by model and ngram; auto adapts.",
        ),
    ] = None,
    verify_window: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel="Drafting", help="Tokens that self proposes between two verifications."
        ),
    ] = 8,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", rich_help_panel="Sampling", help="Most tokens to generate for a sample.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", rich_help_panel="Sampling", help="0 always takes the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", rich_help_panel="Sampling", help="Keep the most likely tokens that add up to P; 1 is off."
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(metavar="K", rich_help_panel="Sampling", help="Keep the K most likely tokens; 0 is off.")
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P", rich_help_panel="Sampling", help="Drop tokens less likely than P times the best; 0 is off."
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="N", rich_help_panel="Sampling", help="Another seed gives another sample.")
    ] = 0,
    n: Annotated[int, typer.Option("--n", metavar="N", rich_help_panel="Sampling", help="Samples a prompt.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            show_default=False,
            rich_help_panel="Sampling",
            help="End the text before TEXT; may be given several times. Taken as it is: write a newline as $'\\n'.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(metavar="N", rich_help_panel="Resources", help="Most requests at a time.")
    ] = 16,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="torch's choice", rich_help_panel="Resources", help="CPU threads."),
    ] = None,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="a share of what is free",
            rich_help_panel="Resources",
            help="Memory for the KV cache, such as 4GiB, 500MB or a number of bytes.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            show_default="<stem>-out",
            rich_help_panel="Run",
            help="Folder for outputs.jsonl, acceptance.jsonl and manifest.json. An unfinished run in it is resumed.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="all", rich_help_panel="Run", help="Run only the first N prompts."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel="Run", help="Start afresh: delete what a former run wrote.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", rich_help_panel="Run", help="Exit with 1 if any prompt could not be run.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", rich_help_panel="Run", help="Show nothing but errors.")
    ] = False,
    allow_nondeterministic: Annotated[
        bool,
        typer.Option(
            "--allow-nondeterministic",
            rich_help_panel="Run",
            help="Run a model that is not deterministic on this device, without the guarantee.",
        ),
    ] = False,
) -> None:
    """Generate a text for every prompt of a file.

    A line's own settings (max_tokens, temperature, ...) win over the options.
    A line that cannot be run becomes an error in the output; the others run.
    """
    from detgen.display import open_display
    from detgen.engine.config import EngineConfig, EngineError
    from detgen.engine.request import RequestError, SamplingParams

    with open_display(quiet=quiet) as display:
        from detgen.run import RunConfig, RunError, run

        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                seed=seed,
                n=n,
                stop=tuple(stop or ()),
            )
            engine = EngineConfig(
                target=target,
                draft=draft,
                drafter=drafter,
                draft_tokens=draft_tokens,
                verify_window=verify_window,
                batch_size=batch_size,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                draft_quant=draft_quant,
                threads=threads,
                kv_memory=kv_memory,
                allow_nondeterministic=allow_nondeterministic,
            )
            summary = run(RunConfig(prompts, output, params, engine, limit, overwrite), display)
        except (EngineError, RequestError, RunError) as error:
            display.error(str(error))
            raise typer.Exit(REFUSED) from None
        except KeyboardInterrupt:
            display.interrupted(_same_command())
            raise typer.Exit(INTERRUPTED) from None

    if summary.status == "interrupted":
        display.interrupted(_same_command())
        raise typer.Exit(INTERRUPTED)
    display.summary(summary)
    if strict and summary.errors:
        raise typer.Exit(FAILED)


def _same_command() -> str:
    """What was typed, less `--overwrite`, which would start afresh instead of going on."""
    return shlex.join(["detgen", *(word for word in sys.argv[1:] if word != "--overwrite")])
