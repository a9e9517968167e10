"""Write the tables of docs/ that are made from declarations: options, exit statuses, parameters, keys of lines,
attributes of classes.

python tools/reference.py

In a page, a table is between `<!-- table: NAME -->` and `<!-- end -->`; `TABLES` has the names.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from detgen import Completion, EngineConfig, Request, Score, ScoreRequest
from detgen.cli import COMMANDS, whole
from detgen.outputs.records import AcceptanceLine, ErrorLine, ScoredToken, ScoreLine, TextLine, TokenEntry, keys_of
from detgen.params import PARAMETERS

PAGES = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"(?<=<!-- table: )(.+?)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def commands() -> dict[str, Any]:
    """Return the commands by what is typed after `detgen`: "run", "cache info"."""

    def all_of(name: str) -> Iterator[tuple[str, Any]]:
        found = whole(name)
        if hasattr(found, "commands"):
            yield from ((f"{name} {part}", command) for part, command in found.commands.items())
        else:
            yield name, found

    return dict(chain.from_iterable(all_of(name) for name in COMMANDS))


def rows(head: str, lines: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; `head` has its column heads, separated by commas."""
    names = head.split(", ")
    cells = [names, ["---"] * len(names), *([cell.replace("|", r"\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def sentence(text: str) -> str:
    """Return a help text in Markdown, with options and values in code."""
    plain = " ".join(text.replace(r"\[", "[").split()).replace("*", r"\*").replace("<", r"\<")
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]+|\$'\\n')", r"`\1`", plain)


def option(parameter: Any) -> tuple[str, str, str]:
    """Return how an option or argument is typed, its default, and its meaning."""
    names: list[str] = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.metavar]
    elif not parameter.is_flag:
        names[0] += f" {parameter.metavar}"
    return code(names), default(parameter), sentence(parameter.help)


def code(names: Iterable[str]) -> str:
    """Return names in Markdown."""
    return ", ".join(f"`{name}`" for name in names)


def default(parameter: Any) -> str:
    """Return what applies if it is not given, as in the help."""
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default.replace("<stem>", "STEM")
    if getattr(parameter, "is_flag", False):
        return "on" if parameter.default else "off"
    return f"`{parameter.default}`" if parameter.show_default and parameter.default is not None else "none"


def options(command: Any) -> str:
    """Return the arguments and options of a command, in the groups of its help."""

    def panel(parameter: Any) -> str:
        return "Arguments" if parameter.param_type_name == "argument" else parameter.rich_help_panel or "Options"

    parts = []
    for name, group in groupby((p for p in command.params if p.name != "help"), panel):
        parts.append(f"**{name}**\n\n{rows('option, default, meaning', map(option, group))}")
    return "\n\n".join(parts)


def statuses() -> str:
    """Return the exit statuses of all commands, as in their help."""
    found = []
    for name, command in commands().items():
        _, told, said = " ".join(command.epilog.split()).partition("Exit status: ")
        if told:
            meanings = dict(re.findall(r"(\d+) (.+?)(?:, (?=\d)|$)", said.rstrip(".")))
            found.append([f"`detgen {name}`", *(sentence(meanings.get(status, "")) for status in ("0", "1", "2"))])
    return rows("command, 0, 1, 2", found)


def parameters() -> str:
    """Return the keys that a line may set, with the options of the same meaning."""
    return rows(
        "key, value, default, option, meaning",
        (
            (
                code((p.name, *p.aliases)),
                p.needed,
                f"`{json.dumps(p.default)}`",
                f"`{p.flag}`" if p.option else "none",
                p.help,
            )
            for p in PARAMETERS.values()
        ),
    )


def keys(kind: type) -> str:
    """Return the keys of a line."""
    return rows("key, contents", ((f"`{name}`", key.text) for name, key in keys_of(kind).items()))


def attributes(kind: type) -> str:
    """Return the attributes of a class, from its docstring."""
    said = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.+(?:\n     .+)*)", said, flags=re.MULTILINE)
    return rows("attribute, meaning", ((f"`{name}`", sentence(text)) for name, text in found))


LINES = (TextLine, ErrorLine, ScoreLine, AcceptanceLine, TokenEntry, ScoredToken)
CLASSES = (EngineConfig, Request, Completion, ScoreRequest, Score)
TABLES: dict[str, Callable[[], str]] = {
    "exit statuses": statuses,
    "parameters": parameters,
    **{kind.__name__: partial(keys, kind) for kind in LINES},
    **{f"attributes of {kind.__name__}": partial(attributes, kind) for kind in CLASSES},
    **{f"options of {name}": partial(options, command) for name, command in commands().items()},
}


def filled(text: str) -> str:
    """Return a page with its tables as declared now.

    Raises:
        KeyError: if it names an unknown table.
    """
    return TABLE.sub(lambda found: found[1] + found[2] + TABLES[found[1]](), text)


def main() -> None:
    """Fill all pages."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if text != (new := filled(text)):
            page.write_text(new, encoding="utf-8")
            print(f"docs/{page.name}")


if __name__ == "__main__":
    main()
