"""Commands whose options are made from declarations: one for each field with an `Option`, so nothing is written twice.

    @command
    def run_command(config: RunConfig, display: Display) -> int:

has an option for each such field of `RunConfig` and of its nested declarations. Options that are not given keep the
declaration's default; those that are given are checked by the declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, is_dataclass
from inspect import Parameter, Signature, signature
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from detgen.declaring import Option, Panel, Part
from detgen.errors import (
    BenchError,
    CheckError,
    EngineError,
    OutputError,
    PromptsError,
    RequestError,
    RunError,
    StoreError,
)
from detgen.failing import limit_reached
from detgen.worker import WorkerError

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # an internal error ends with 70, see `detgen.failing`
_ERRORS = (BenchError, StoreError, CheckError, EngineError, OutputError, PromptsError, RequestError, RunError)
_PANELS = get_args(Panel)
_OWN = ("display", "return")  # annotations that are not options, of types imported only for type checkers


@dataclass
class Shown:
    """Options of all commands: how a command shows its work."""

    PANEL = "Input and output"

    quiet: Annotated[bool, Option(None, "--quiet -q"), "Show only problems."] = False
    log_format: Annotated[
        Literal["text", "json"],
        Option("text|json"),
        "Format of progress and notices on standard error; json writes one object per line.",
    ] = "text"


@dataclass
class _Declaration:
    """A parameter of a command that is made from several options."""

    kind: Callable[..., Any]
    optional: bool
    fixed: dict[str, Any]
    fields: dict[str, Parameter | _Declaration] = field(default_factory=dict)

    def parameters(self) -> Iterator[Parameter]:
        """Yield all options, including those of nested declarations."""
        for part in self.fields.values():
            yield from [part] if isinstance(part, Parameter) else part.parameters()

    def build(self, values: dict[str, Any]) -> Any:
        """Build the declaration from the given values; None if it is optional and none is given."""
        given = {name: values[p.name] for name, p in self.fields.items() if isinstance(p, Parameter)}
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
        if self.optional and not given:
            return None
        parts = {name: p.build(values) for name, p in self.fields.items() if isinstance(p, _Declaration)}
        return self.kind(**self.fixed, **given, **parts)


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Make a typer command of a function: declared parameters become options, its return value the exit status.

    The parameter `display` shows progress and messages. Errors that the user can fix are shown in one line.
    """
    hints = SimpleNamespace(__annotations__={k: v for k, v in function.__annotations__.items() if k not in _OWN})
    typed = get_type_hints(hints, function.__globals__, include_extras=True)
    made: dict[str, Parameter | _Declaration] = {}
    for name, parameter in signature(function).parameters.items():
        if name in typed and _is_declaration((bare := _bare(typed[name]))[0]):
            made[name] = _declaration(*bare)
        elif name in typed:
            made[name] = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=typed[name])
    asked, shown = _Declaration(dict, False, {}, made), _declaration(Shown, ())
    parameters = sorted([*asked.parameters(), *shown.parameters()], key=_place)

    def run(**values: Any) -> None:
        from detgen.show.progress_view import open_display

        how = shown.build(values)
        display = open_display(quiet=how.quiet, as_json=how.log_format == "json")
        try:
            status = function(**asked.build(values), display=display)
        except (*_ERRORS, WorkerError) as error:
            display.error(as_typed(error, parameters))
            status = REFUSED
        except OSError as error:
            if getattr(error, "__notes__", None):  # a run adds the traceback of unexpected errors
                raise
            display.error(limit_reached(error) or f"cannot write {error.filename or 'the result'}: {error.strerror}")
            status = REFUSED
        except KeyboardInterrupt:
            display.notice("interrupted; nothing was concluded")
            status = INTERRUPTED
        if status:
            raise typer.Exit(status)

    # Help breaks lines at the width of the terminal, not where the source does.
    paragraphs = [" ".join(paragraph.split()) for paragraph in (function.__doc__ or "").split("\n\n")]
    run.__name__, run.__doc__, run.__annotations__ = function.__name__, "\n\n".join(paragraphs), {}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def epilog(*examples: str, status: str) -> str:
    """Return the end of a command's help: examples, and the meanings of its exit statuses."""
    lines = (f"  [bold]{example}[/]" for example in examples)
    return "\n".join(("Examples:", *lines, "", f"Exit status: {status}, 70 internal error, 130 interrupted."))


def _declaration(kind: Any, extras: tuple[Any, ...], *, optional: bool = False) -> _Declaration:
    part = next((extra for extra in extras if isinstance(extra, Part)), Part())
    made = _Declaration(kind, optional, part.fixed)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner, said = _bare(hint)
        if part.names and name not in part.names:
            continue
        if _is_declaration(inner):
            made.fields[name] = _declaration(inner, said, optional=_default(kind, name) is None)
        elif (option := next((extra for extra in said if isinstance(extra, Option)), None)) is not None:
            made.fields[name] = _parameter(kind, name, inner, option, _help(said), part.defaults.get(name))
    return made


def _parameter(kind: Any, name: str, hint: Any, option: Option, help: str, shown: str | None) -> Parameter:
    default, shown = _default(kind, name), shown or option.default
    names = option.name.split() if option.name else [f"--{name.replace('_', '-')}"]
    annotation: Any = str if hint is Any or option.parser else hint
    if get_origin(annotation) is tuple:
        annotation = list[_bare(get_args(annotation)[0])[0]]  # type: ignore[misc]
    elif annotation is bool and default:
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
    if default == () or (shown and annotation is not bool):
        default = None  # leave it to the declaration
    said: dict[str, Any] = {
        "metavar": option.metavar,
        "parser": option.parser and parser(option.parser),
        "autocompletion": (lambda: list(option.values)) if option.values else None,
        "show_default": shown or (default not in (None, Parameter.empty) and annotation is not bool),
        "help": f"{help} {option.note}".strip().replace("[", "\\["),
    }
    if option.positional:
        annotated: Any = Annotated[annotation, typer.Argument(**said)]
    else:
        panel = option.panel or getattr(kind, "PANEL", None)
        annotated = Annotated[annotation, typer.Option(*names, rich_help_panel=panel, **said)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without `None` and annotations, and its annotations."""
    extras: tuple[Any, ...] = ()
    while get_origin(hint) in (Annotated, Union, UnionType):
        if get_origin(hint) is Annotated:
            extras, hint = (*extras, *hint.__metadata__), hint.__origin__
            continue
        members = [member for member in get_args(hint) if member is not NoneType]
        if len(members) > 1:
            return hint, extras
        hint = members[0]
    return hint, extras


def _is_declaration(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "model_fields")


def _default(kind: Any, name: str) -> Any:
    """Return a field's default, `Parameter.empty` if it has none."""
    if models := getattr(kind, "model_fields", None):
        return Parameter.empty if models[name].is_required() else models[name].get_default(call_default_factory=True)
    declared = kind.__dataclass_fields__[name]
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return Parameter.empty if declared.default is MISSING else declared.default


def _help(extras: tuple[Any, ...]) -> str:
    """Return the description of a field, or the text in its annotation."""
    return next(text for e in extras if (text := e if isinstance(e, str) else getattr(e, "description", None)))


def _place(parameter: Parameter) -> tuple[int, int]:
    """Order arguments first, then options by panel."""
    said = next(e for e in parameter.annotation.__metadata__ if hasattr(e, "rich_help_panel"))
    return isinstance(said, OptionInfo), _PANELS.index(said.rich_help_panel or _PANELS[0])


def parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for typer, which reports a ValueError as wrong usage."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def as_typed(error: Exception, parameters: Iterable[Parameter] = ()) -> str:
    """Return an error's message, with the system limit behind it if there is one.

    Settings that are out of range, refused, or in conflict are named by their options: `--batch-size must be ...`.
    """
    infos = ((p.name, e) for p in parameters for e in p.annotation.__metadata__)
    names = {
        name: e.default.partition("/")[0]
        for name, e in infos
        if isinstance(e, OptionInfo) and isinstance(e.default, str)
    }
    said = re.sub(
        r"^[a-z_]+(?= must be | must have | is refused: | cannot be combined with )|(?<= combined with )[a-z_]+(?=: )|"
        r"(?<=^both )[a-z_]+(?= and )|(?<= and )[a-z_]+(?= are given; )",
        lambda found: names.get(found[0], "--" + found[0].replace("_", "-")),
        str(error),
    )
    limit = limit_reached(error)
    return said if limit is None or limit in said else f"{said} ({limit})"
