"""What a declared field says of itself beside its type: how a person asks for it. Imports nothing of detgen.

    top_k: Annotated[int, Field(ge=0, description="Sample from the K most likely tokens; 0 is off."), Option("K")] = 0

A field with an `Option` is an option of each command that takes the declaration (`detgen.cli.declared`), and its
description is the help. One without is for programs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Panel = Literal[
    "Options", "Workload", "Sampling", "Model", "Speed", "Input and output", "Expert"
]  # in the order of the help


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is an option of the command line.

    Attributes:
        metavar: what stands for its value; None for a flag.
        name: of the option, and others after a blank, if it is not the field's with dashes.
        panel: the group of the help that it stands in, where it is not that of its declaration (`PANEL`); Options are
            those that people need first.
        parser: the value of a text, where the type does not say it; raises ValueError with what is allowed.
        default: what the help calls the default, where it is not the value itself.
        note: what the help says beside what the field is for.
        values: what a shell completes.
        positional: whether it is an argument and no option.
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
    """Where only some fields of a declaration are asked for: `Annotated[EngineConfig, Part("target", "device")]`.

    Args:
        names: of the fields.
        defaults: what the help calls the default of some of them there.
        fixed: the values of others.
    """

    def __init__(self, *names: str, defaults: dict[str, str] | None = None, **fixed: Any) -> None:
        self.names, self.defaults, self.fixed = names, defaults or {}, fixed
