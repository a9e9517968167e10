"""`detgen audit`: judges a run that is already there. What it does is in `detgen.verify.replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detgen.cli.answering import JsonFile, MovedPrompts, answered, import_engine
from detgen.cli.declared import command, epilog
from detgen.declaring import Part
from detgen.engine.config import EngineConfig

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = epilog(
    "detgen audit out",
    "detgen audit out moved/prompts.jsonl --json audit.json",
    "detgen audit out --target models/large --device cpu",
    status="0 nothing differs, 1 faults found, 2 refused",
)
Judge = Annotated[
    EngineConfig,
    Part(
        *("target", "device", "dtype", "kv_dtype", "adapter", "target_quant"),
        *("trust_remote_code", "threads", "kv_memory"),
        defaults={"target": "the run's own", "adapter": "the run's own"},
    ),
]


@command
def audit_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The output folder of a run.")],
    engine: Judge,
    prompts: MovedPrompts = None,
    json_file: JsonFile = None,
    *,
    display: QuietDisplay,
) -> int:
    """Judge a finished or stopped run without generating: its manifest, files and lines, and each of its tokens.

    The number format and the quantization are the run's own unless given. If the profile here is not that of the run,
    bit equality is not promised: a token within the rounding error then counts as a tie.
    """
    return audit(out, prompts, engine, json_file, display)


def audit(out: Path, prompts: str | None, engine: EngineConfig, json_file: Path | None, display: QuietDisplay) -> int:
    """Judge a run and show what was found; the exit status."""
    from detgen.verify.replay.early import check_early

    with display:
        check_early(out, engine, prompts, display)
        import_engine(display)
        from detgen.verify.replay.audit import audit_run

        result = audit_run(out, engine, prompts, display)
    from detgen.show.answers import show_audit

    if result.faults or not display.quiet:
        show_audit(result, out)
    return answered(result.as_dict(), json_file, display)


COMMANDS = {"audit": (audit_command, EPILOG)}
