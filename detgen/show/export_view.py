"""How `detgen export` shows what it wrote."""

from __future__ import annotations

from rich.text import Text

from detgen.export.exporting import Exported
from detgen.show.screen import open_output


def show_export(exported: Exported) -> None:
    """One line."""
    line = f"{exported.path}: {exported.count:,} {exported.unit}"
    open_output().print(Text(line), soft_wrap=True)
