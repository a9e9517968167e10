"""Commands made of declarations: what is asked for, where the help shows it, and how a command ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import typer
from helpers.commands import invoke
from pydantic import BaseModel, Field
from typer.testing import CliRunner, Result

from detgen import cli
from detgen.cli.declared import command
from detgen.declaring import Option, Part
from detgen.errors import EngineError, OutputError, RunError
from detgen.progress import Progress


def number(text: str) -> int:
    if text != "seven":
        raise ValueError(f"{text!r} is not seven")
    return 7


class Inner(BaseModel):
    PANEL: ClassVar = "Sampling"

    heat: Annotated[float, Field(ge=0, description="How [hot]."), Option("T", panel="Options")] = 0.5
    words: Annotated[tuple[str, ...], Field(description="Words."), Option("WORD", "--word")] = ()
    silent: float = 1.0


@dataclass
class Few:
    count: Annotated[int | None, Option("N", "--few"), "How few."] = None


@dataclass
class Outer:
    place: Annotated[Path, Option("PLACE", positional=True), "Where."]
    inner: Inner = field(default_factory=Inner)
    few: Few | None = None
    loud: Annotated[bool, Option(panel="Expert"), "Be loud."] = False
    sure: Annotated[bool, Option(panel="Expert"), "Be sure."] = True
    kind: Annotated[Literal["a", "b"], Option("a|b"), "Which."] = "a"
    seven: Annotated[int, Option("S", parser=number, default="seven, of course", note="Or so."), "Seven."] = 7


Ask = Callable[..., tuple[Result, Any]]


@pytest.fixture
def ask() -> Ask:
    """Invoke a command that takes an `Outer`; what it was given."""

    def ask(*arguments: str, does: Callable[[Any], int] = lambda display: 0) -> tuple[Result, Any]:
        given: list[Any] = []

        @command
        def asked(
            outer: Outer, more: Annotated[int, typer.Option(metavar="N", help="More.")] = 3, *, display: Any
        ) -> int:
            """What it does.

            More of it, which is not said in one line of the source, but in one of a terminal
            as wide as this one.
            """
            given.append((outer, more))
            return does(display)

        app = typer.Typer()
        app.command()(asked)
        result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, list(arguments))
        return result, given[0] if given else None

    return ask


def test_what_is_not_given_is_left_to_the_declaration(ask: Ask) -> None:
    assert ask("here")[1] == (Outer(Path("here")), 3)


def test_what_is_given_arrives(ask: Ask) -> None:
    result, given = ask(
        *("here", "--heat", "2", "--word", "a", "--word", "b", "--few", "1", "--loud", "--no-sure", "--kind", "b"),
        *("--seven", "seven", "--more", "4"),
    )
    assert result.exit_code == 0, result.output
    inner = Inner(heat=2, words=("a", "b"))
    assert given == (Outer(Path("here"), inner, Few(1), loud=True, sure=False, kind="b", seven=7), 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["here", "--kind", "c"], "'c' is not one of 'a', 'b'"),
        (["here", "--seven", "8"], "Invalid value for '--seven': '8' is not seven"),
        (["here", "--silent", "1"], "No such option: --silent"),
        ([], "Missing argument 'PLACE'"),
    ],
)
def test_wrong_usage(ask: Ask, arguments: list[str], said: str) -> None:
    result, given = ask(*arguments)
    assert (result.exit_code, given) == (2, None)
    assert said in " ".join(result.output.replace("│", " ").split())


def test_the_help_says_what_the_declaration_says(ask: Ask) -> None:
    shown = ask("--help")[0].output
    panels = [line.split()[1] for line in shown.splitlines() if line.startswith("╭")]
    assert panels == ["Arguments", "Options", "Sampling", "Input", "Expert"]
    words = " ".join(shown.replace("│", " ").split())
    for said in ("How [hot]. [default: 0.5]", "--word WORD Words.", "Seven. Or so. [default: (seven, of course)]"):
        assert said in words
    assert "silent" not in words
    assert " More of it, which is not said in one line of the source, but in one of a terminal as wide as this" in shown


def test_a_part_of_a_declaration(ask: Ask) -> None:
    @command
    def asked(
        outer: Annotated[Outer, Part("seven", "kind", defaults={"kind": "none"}, place=Path("x"))], display: Any
    ) -> int:
        return int(outer == Outer(Path("x"), kind="b"))

    app = typer.Typer()
    app.command()(asked)
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"]).output
    assert "[default: (none)]" in shown
    assert "--heat" not in shown
    assert CliRunner().invoke(app, ["--kind", "b"]).exit_code == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (EngineError("heat must be at most 3"), 2, "detgen: error: --heat must be at most 3\n"),
        (OutputError("words must be few"), 2, "detgen: error: --word must be few\n"),
        (RunError("other must be few"), 2, "detgen: error: --other must be few\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "detgen: error: cannot write x: No such file\n"),
        (KeyboardInterrupt(), 130, "detgen: interrupted; nothing was concluded\n"),
    ],
)
def test_how_a_command_ends(ask: Ask, error: BaseException, code: int, said: str) -> None:
    def fail(display: Any) -> int:
        raise error

    result, _ = ask("here", does=fail)
    assert (result.exit_code, result.stderr) == (code, said)
    assert ask("here", does=lambda display: 1)[0].exit_code == 1


def test_a_fault_keeps_its_traceback(ask: Ask) -> None:
    kept = FileNotFoundError(2, "No such file", "x")
    kept.add_note("the traceback is in out/detgen-error.log")
    for error in (ZeroDivisionError(), kept):
        assert ask("here", does=lambda display, error=error: (_ for _ in ()).throw(error))[0].exception is error


def test_progress_for_programs(ask: Ask) -> None:
    """An object a line, with a time; figures are those of the progress."""

    def work(display: Any) -> int:
        with display:
            display.stage("reading")
            display.message("a\x1b[31m message\n")
            for done in range(25):
                display.progress(Progress(done, None, "prompts", done / 10, figures=("1 tokens/s",)))
        display.notice("ended", "detgen run")
        display.error("failed")
        return 2

    lines = ask("here", "--log-format", "json", does=work)[0].stderr.splitlines()
    assert all(line.isprintable() for line in lines)
    found = [json.loads(line) for line in lines]
    assert all(entry.pop("time") > 1e9 for entry in found)
    progress = {"event": "progress", "total": None, "unit": "prompts", "left": None, "figures": ["1 tokens/s"]}
    progress |= {"tokens": None, "tokens_per_second": None}
    assert found == [
        {"event": "stage", "text": "reading"},
        {"event": "message", "text": "a\x1b[31m message\n"},
        *({**progress, "done": done, "seconds": done / 10} for done in (0, 10, 20, 24)),
        {"event": "notice", "text": "ended", "command": "detgen run"},
        {"event": "error", "text": "failed"},
    ]
    quiet = ask("here", "--log-format", "json", "-q", does=work)[0].stderr.splitlines()
    assert [json.loads(line)["event"] for line in quiet] == ["notice", "error"]


ALL = [name for name in cli.COMMANDS if name not in ("cache", "schema")]


@pytest.mark.parametrize(
    "words", [[], ["schema"], ["cache"], ["cache", "info"], ["cache", "prune"], *([name] for name in ALL)]
)
def test_the_help_has_no_types_of_flags(words: list[str]) -> None:
    shown = invoke(*words, "--help").output
    assert "<bool>" not in shown
    assert "{" not in shown.partition("╭")[0], "in the usage"


@pytest.mark.parametrize("words", [["cache", "info"], ["cache", "prune"], *([name] for name in ALL)])
def test_every_command_shows_its_work_alike(words: list[str]) -> None:
    shown = " ".join(invoke(*words, "--help").output.replace("│", " ").split())
    assert "--quiet -q Show only problems." in shown
    assert "--log-format text|json" in shown


def test_the_help_of_a_run_begins_with_what_people_need_first() -> None:
    options = [p for p in cli.whole("run").params if p.param_type_name == "option"]
    first = [p.opts[0] for p in options if p.rich_help_panel in (None, "Options")]
    last = [p.opts[0] for p in options if p.rich_help_panel == "Expert"]
    assert len(first) == 10
    assert {"--prompt", "--output", "--target", "--max-tokens", "--temperature"} <= set(first)
    assert {"--speculative-prefill", "--show-thoughts", "--trust-remote-code"} <= set(last)
    assert "Usage: detgen run [OPTIONS] [PROMPTS]" in invoke("run", "--help").output
    assert "Usage: detgen score [OPTIONS] PROMPTS" in invoke("score", "--help").output
