"""How `detgen cache` shows what a cache holds, and what was removed from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from detgen.cache.pruning import Contents, Pruned
from detgen.show.screen import open_output, size


def show_contents(path: Path, contents: Contents) -> None:
    """A label and a value per line."""
    rows = list(_rows(path, contents))
    width = max(len(label) for label, _ in rows)
    console = open_output()
    for label, value in rows:
        console.print(Text.assemble((f"{label:<{width}}", "bold"), f"  {value}"), soft_wrap=True)


def show_pruned(path: Path, pruned: Pruned) -> None:
    """One line."""
    line = f"{path}: {_completions(pruned.removed)} removed, {size(pruned.after)} left of {size(pruned.before)}"
    open_output().print(Text(line), soft_wrap=True)


def _rows(path: Path, contents: Contents) -> Iterator[tuple[str, str]]:
    yield "cache", str(path)
    yield "size", size(contents.size)
    yield "completions", f"{contents.completions:,}"
    yield "tokens", f"{contents.tokens:,}"
    if contents.oldest is not None and contents.latest is not None:
        yield "least recent use", _day(contents.oldest)
        yield "latest use", _day(contents.latest)
    if contents.damaged is not None:
        yield "damaged", f"{contents.damaged:,}"
    for model in contents.models:
        other = "" if model.usable else f"; of detgen {model.version}, which this one cannot use"
        yield (
            "model",
            f"{model.name} ({model.digest}): {_completions(model.completions)}, {model.tokens:,} tokens{other}",
        )


def _completions(count: int) -> str:
    return "1 completion" if count == 1 else f"{count:,} completions"


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
