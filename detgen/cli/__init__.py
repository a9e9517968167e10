"""The command line: parse, call, show. It knows options and exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from detgen import __version__
from detgen.cli import (
    audit_command,
    bench_command,
    cache_command,
    export_command,
    report_command,
    run_command,
    schema_command,
    score_command,
    verify_command,
)
from detgen.failing import DEBUG


class _Commands(TyperGroup):
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

            error.format_message = lambda: plain(message())  # type: ignore[attr-defined]
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


app.command("run", no_args_is_help=True, epilog=run_command.EPILOG)(run_command.run_command)
app.command("score", no_args_is_help=True, epilog=score_command.EPILOG)(score_command.score_command)
app.command("audit", no_args_is_help=True, epilog=audit_command.EPILOG)(audit_command.audit_command)
app.command("export", no_args_is_help=True, epilog=export_command.EPILOG)(export_command.export_command)
app.command("report", no_args_is_help=True, epilog=report_command.EPILOG)(report_command.report_command)
app.command("schema", no_args_is_help=True, epilog=schema_command.EPILOG)(schema_command.schema_command)
app.add_typer(cache_command.app, name="cache")
app.command("bench", epilog=bench_command.EPILOG)(bench_command.bench_command)
app.command("verify-determinism", epilog=verify_command.EPILOG)(verify_command.verify_command)
