"""How declared fields become options of the command line. Imports nothing of detgen.

    top_k: Annotated[int, Field(ge=0, description="Sample from the K most likely tokens; 0 is off."), Option("K")] = 0

A field with an `Option` is an option of each command that takes the declaration (`detgen.cli.declared`), and its
description is the help. A field without an `Option` can only be set by programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Panel = Literal[
    "Options", "Workload", "Sampling", "Model", "Speed", "Input and output", "Expert"
]  # in the order in which the help shows them


@dataclass(frozen=True, slots=True)
class Option:
    """How a field becomes an option of the command line.

    Attributes:
        metavar: the placeholder for the value in the help; None for a flag.
        name: the option's name, with any further names after spaces; None for the field's name with dashes.
        panel: the group that shows it in the help; None for the group of its declaration (`PANEL`). "Options" are those
            that people need first.
        parser: converts the text to a value where the type does not determine how; raises ValueError that says what is
            allowed.
        default: the help's words for the default; None shows the value itself.
        note: a sentence that the help adds to the description.
        values: what a shell completes.
        positional: whether it is an argument instead of an option.
    """

    metavar: str | None = None
    name: str | None = None
    panel: Panel | None = field(default=None, kw_only=True)
    parser: Callable[[str], Any] | None = field(default=None, kw_only=True)
    default: str | None = field(default=None, kw_only=True)
    note: str = field(default="", kw_only=True)
    values: tuple[str, ...] = field(default=(), kw_only=True)
    positional: bool = field(default=False, kw_only=True)


class Part:
    """Selects some fields of a declaration: `Annotated[EngineConfig, Part("target", "device")]`.

    Args:
        names: the fields that are options.
        defaults: the help's words for the defaults of some of them.
        fixed: the values of other fields.
    """

    def __init__(self, *names: str, defaults: dict[str, str] | None = None, **fixed: Any) -> None:
        self.names, self.defaults, self.fixed = names, defaults or {}, fixed
