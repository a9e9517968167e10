"""The command line: parse, call, show. It knows options and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from detgen import __version__
from detgen.cli import (
    audit_command,
    bench_command,
    cache_command,
    doctor_command,
    export_command,
    models_command,
    report_command,
    run_command,
    schema_command,
    verify_command,
)
from detgen.failing import DEBUG


class _Plain:
    """A command whose help has no types where there is nothing to type, and no signs for what usage is."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) or param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class _Command(_Plain, TyperCommand):
    """One of the commands."""


class _Run(_Command):
    """The one command that reads standard input if nothing is typed: at a terminal, it shows its help instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        self.no_args_is_help = at_a_terminal()
        return super().parse_args(ctx, args)


def at_a_terminal() -> bool:
    """Whether nothing is piped in."""
    return sys.stdin is None or sys.stdin.isatty()


class _Commands(_Plain, TyperGroup):
    """The commands; a usage error that quotes what was typed is shown as plainly as everything else."""

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
        message = getattr(error, "format_message", None)  # of usage errors; typer has no public name for them all
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


_COMMANDS: dict[str, tuple[Any, str]] = {
    "run": (run_command.run_command, run_command.RUN_EPILOG),
    "score": (run_command.score_command, run_command.SCORE_EPILOG),
    "audit": (audit_command.audit_command, audit_command.EPILOG),
    "export": (export_command.export_command, export_command.EPILOG),
    "report": (report_command.report_command, report_command.EPILOG),
    "models": (models_command.models_command, models_command.EPILOG),
    "doctor": (doctor_command.doctor_command, doctor_command.EPILOG),
    "schema": (schema_command.schema_command, schema_command.EPILOG),
    "bench": (bench_command.bench_command, bench_command.EPILOG),
    "verify-determinism": (verify_command.verify_command, verify_command.EPILOG),
}
for _name, (_command, _epilog) in _COMMANDS.items():
    _needs = _name not in ("run", "bench", "verify-determinism", "models", "doctor")  # something to be named
    app.command(_name, cls=_Run if _name == "run" else _Command, no_args_is_help=_needs, epilog=_epilog)(_command)
app.add_typer(cache_command.app, name="cache", cls=_Commands)
for _name, (_command, _epilog) in cache_command.COMMANDS.items():
    cache_command.app.command(_name, cls=_Command, epilog=_epilog)(_command)
