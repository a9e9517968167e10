"""`detgen run` and `detgen score`: prompts in, a folder of outputs out, or standard output.

`detgen.run` does the work, `detgen.show` shows the results. The commands import both when they are called, since they
import the engine and rich, which `--help` does not need.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.answering import writable
from detgen.cli.declared import DONE, FAILED, INTERRUPTED, command, epilog
from detgen.cli.quick import ReaderLeftError, quick, to_standard_output
from detgen.run import RunConfig, RunSummary, ScoreConfig

if TYPE_CHECKING:
    from detgen.progress import Observer
    from detgen.show.progress_view import QuietDisplay

RUN_EPILOG = epilog(
    "detgen run prompts.jsonl",
    "detgen run --prompt 'def add(a, b):' --max-tokens 40",
    "detgen run prompts.jsonl -o out --max-tokens 200 --temperature 0.8 --seed 7",
    "detgen run chats.jsonl --target models/large --draft models/small",
    "zcat prompts.jsonl.gz | detgen run -o - --stop $'\\n\\n' | jq .text",
    status="0 done, 1 no prompt could be run (with --strict: some could not), 2 refused",
)
SCORE_EPILOG = epilog(
    "detgen score questions.jsonl",
    "detgen score questions.jsonl -o scores --target models/large",
    "detgen score 'hf://NAME?split=test&column=text'",
    status="0 done, 1 no prompt could be scored (with --strict: some could not), 2 refused",
)
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", rich_help_panel="Input and output", help="Exit with 1 if any prompt could not be run or scored."
    ),
]

Status = Annotated[
    Path | None,
    typer.Option(
        "--status-file",
        metavar="FILE",
        callback=writable,
        show_default=False,
        rich_help_panel="Input and output",
        help="Keep the run's progress in FILE, a JSON object, for programs that poll it.",
    ),
]


@command
def run_command(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            show_default=False,
            help="A prompt, instead of PROMPTS; may be given several times. Without --output, the text alone is"
            " printed, as it is for plain text on standard input.",
        ),
    ] = None,
    config: RunConfig,
    strict: Strict = False,
    status_file: Status = None,
    display: QuietDisplay,
) -> int:
    """Generate text for every prompt of a file, or for prompts given here.

    A line's own settings (max_tokens, temperature, ...) override the options.
    A line that cannot be run becomes an error in the output; the rest run.
    """
    config, bare = quick(config, prompt or (), display.message)
    return go(config, display, strict=strict, bare=bare, status_file=status_file)


@command
def score_command(
    config: ScoreConfig, strict: Strict = False, status_file: Status = None, *, display: QuietDisplay
) -> int:
    """Write the log-probabilities of given completions, or of whole texts, token by token and in sum.

    A line that cannot be scored becomes an error in the output; the rest are scored.
    """
    return go(config, display, strict=strict, status_file=status_file)


def go(
    config: RunConfig | ScoreConfig,
    display: QuietDisplay,
    *,
    strict: bool,
    bare: bool = False,
    status_file: Path | None = None,
) -> int:
    """Run or score, and show how it ended. Return the exit status.

    Args:
        display: shows messages and progress.
        display: is told how it goes.
        strict: whether a single error is a failure.
        bare: whether only texts are printed and nothing is kept.
        status_file: file for the run's progress, if any.
    """
    kept = not bare and str(config.output) != "-"
    summary = None
    try:
        with display:
            if kept:
                summary = watched(config, display, status_file)
            else:
                with to_standard_output(config, display, bare=bare) as (config, following):
                    summary = watched(config, following, status_file)
                    following.follow()
                    return conclude(summary, display, strict=strict, kept=False)
    except ReaderLeftError:
        return DONE
    except KeyboardInterrupt:
        pass  # ends like an interruption of the generation
    return conclude(summary, display, strict=strict, kept=kept)


def watched(config: RunConfig | ScoreConfig, observer: Observer, status_file: Path | None) -> RunSummary:
    """Run or score, and keep any status file up to date."""
    from detgen.run import run
    from detgen.show.status_file import StatusFile

    if status_file is None:
        return run(config, observer)
    with StatusFile(status_file, observer) as status:
        summary = run(config, status)
        status.end(summary.status)
        return summary


def conclude(summary: RunSummary | None, display: QuietDisplay, *, strict: bool, kept: bool) -> int:
    """Show how a run ended. Return the exit status. None is an interruption."""
    display.close()
    if summary is None or summary.status == "interrupted":
        if kept:
            display.notice(
                "interrupted. What was finished is kept; to resume, run the same command again:", same_command()
            )
        else:
            display.notice("interrupted, and nothing is kept; a run with --output DIR can be resumed")
        return INTERRUPTED

    from detgen.show.answers import failures, print_chunks, print_summary

    if kept and not display.quiet:
        print_summary(summary)
    elif summary.chunks and not kept:
        print_chunks(summary.chunks)
    for line in failures(summary, kept=kept):
        display.notice(line)
    return FAILED if summary.written.errors and (strict or summary.all_failed) else DONE


def same_command() -> str:
    """Return the command that was typed, without `--overwrite`, which would start over instead of resuming."""
    return " ".join(["detgen", *(_quoted(word) for word in sys.argv[1:] if word != "--overwrite")])


def _quoted(word: str) -> str:
    """Quote a word for a shell; if it has unprintable characters, as $'...' for Bash, Zsh and newer shells."""
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(
        c if c.isprintable() and c not in "'\\" else "".join(f"\\x{b:02x}" for b in os.fsencode(c)) for c in word
    )
    return f"$'{shown}'"


COMMANDS = {"run": (run_command, RUN_EPILOG), "score": (score_command, SCORE_EPILOG)}
