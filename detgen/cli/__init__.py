"""The command line: parse, call, show. It knows options and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from detgen import __version__
from detgen.failing import DEBUG


class _Plain:
    """A command whose help shows types only where a value is typed, and usage without braces."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) or param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class _Command(_Plain, TyperCommand):
    """A command."""


class _Run(_Command):
    """`detgen run`, which reads standard input if no arguments are given; at a terminal, it shows its help instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        self.no_args_is_help = at_a_terminal()
        return super().parse_args(ctx, args)


def at_a_terminal() -> bool:
    """Return whether nothing is piped to standard input."""
    return sys.stdin is None or sys.stdin.isatty()


class _Listed(_Plain, TyperCommand):
    """A command in the list of commands: its name and the first sentence of its help."""


class _Commands(_Plain, TyperGroup):
    """The group of commands; usage errors that quote what was typed are shown without control characters, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        if name and isinstance(found, _Listed):
            found = whole(name)
        return name, found, rest

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _shown_plainly():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _shown_plainly():
            return super().invoke(ctx)


@contextmanager
def _shown_plainly() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = getattr(error, "format_message", None)  # usage errors have it; typer has no public base for them
        if message is not None:
            from detgen.show.screen import plain

            error.format_message = lambda: plain(message().replace("Value error, ", ""))  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="detgen",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"detgen {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Example: [bold]detgen run prompts.jsonl -o out --max-tokens 200[/]\n\n"
    "[bold]detgen COMMAND --help[/] lists the options of a command."
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG, help="Show the traceback of an internal error.")
    ] = False,
) -> None:
    """Generate text for a file of prompts, and write the same bytes every time.

    No matter the batch size, the order of the prompts, the draft model, the number of threads, or a crash and a resume.
    """
    if debug:
        os.environ[DEBUG] = "1"


# Each command by name: its module and the first sentence of its help. The module is imported only when its command
# is typed, since declaring the options of all commands takes longer than showing this list.
COMMANDS = {
    "run": ("run_command", "Generate text for every prompt of a file, or for prompts given here."),
    "score": (
        "run_command",
        "Write the log-probabilities of given completions, or of whole texts, token by token and in sum.",
    ),
    "audit": (
        "verify_command",
        "Judge a finished or stopped run without generating: its manifest, files and lines, and each of its tokens.",
    ),
    "export": (
        "export_command",
        "Write a finished run as a table, or as results of the OpenAI batch API. OUT stays as it is.",
    ),
    "report": (
        "report_command",
        "Draw what a run did on one page of HTML: what was drafted, accepted, corrected and rolled back, and why.",
    ),
    "models": (
        "models_command",
        "List models, and what their weights and a thousand tokens of context take in memory.",
    ),
    "doctor": (
        "doctor_command",
        "Look at the processor, the compiled code, memory, caches and libraries, and generate a few tokens.",
    ),
    "schema": ("schema_command", "Print the JSON Schema of an input line: its keys, their types and what they mean."),
    "bench": ("bench_command", "Measure detgen on this machine, beside transformers and whatever else is installed."),
    "verify-determinism": (
        "verify_command",
        "Try to break the guarantee on this machine, with these models and prompts.",
    ),
    "cache": ("cache_command", "Show or prune the completion cache, which `detgen run --cache` fills."),
}
_MAY_BE_BARE = ("run", "bench", "verify-determinism", "models", "doctor")  # commands that need no arguments


def _listed() -> None:
    """Stand in for a command until it is imported."""


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, cls=_Listed, help=_line)(_listed)


def whole(name: str) -> Any:
    """Return a command with its options, or a group with its commands."""
    module = import_module(f"detgen.cli.{COMMANDS[name][0]}")
    group = getattr(module, "group", None)
    made = typer.Typer(
        cls=_Commands,
        callback=group,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for part, (command, epilog) in module.COMMANDS.items():
        if group or part == name:
            kind = _Run if part == "run" else _Command
            bare = group or part in _MAY_BE_BARE
            made.command(part, cls=kind, no_args_is_help=not bare, epilog=epilog)(command)
    return typer.main.get_command(made)
