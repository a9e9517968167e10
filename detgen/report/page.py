"""Render a report as a page by templates. The same report gives the same bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

import detgen
from detgen.errors import OutputError
from detgen.outputs import open_plain
from detgen.outputs.directory import Directory
from detgen.report import tables, window_life
from detgen.report.reporting import Report
from detgen.report.words import counted, harmless, share, text_of, visible

MARK = '<meta name="generator" content="detgen report">'  # identifies a page
_TEMPLATES = Path(__file__).parent / "templates"


def check_place(path: Path) -> None:
    """Check that a page can be written to a path without destroying another file.

    Raises:
        OutputError: if there is another file.
    """
    try:
        with open(open_plain(path), "rb") as file:
            head = file.read(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with -o") from None
    if head and MARK.encode() not in head:
        raise OutputError(f"{path} was not written by detgen report; choose another file with -o")


def write(report: Report, path: Path) -> int:
    """Write the page, replacing any former one. Return its size in bytes.

    Raises:
        OutputError: if it cannot be written.
    """
    page = render(report).encode()
    try:
        place = Directory(path.parent)
        try:
            place.write(path.name, page)
        finally:
            place.close()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with -o") from None
    return len(page)


def render(report: Report) -> str:
    """Return the page as HTML."""
    return _template().render(report=report).strip() + "\n"


def _harmless(value: object) -> object:
    """Escape control characters and invalid Unicode, whatever a name or a file contains."""
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _template() -> Template:
    """Return the template, compiled once per process."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters.update(n="{:,}".format, of=counted, share=share, visible=visible, text=text_of)
    environment.globals.update(
        mark=Markup(MARK),
        style=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        version=detgen.__version__,
        tables=tables,
        windows=window_life,
    )
    return environment.get_template("page.html")
