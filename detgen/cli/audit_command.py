"""`detgen audit`: judges a run that is already there. What it does is in `detgen.verify.replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from detgen.cli import options
from detgen.cli.answering import JsonFile, Quiet, conclude, errors_shown, load_torch

EPILOG = "\n".join(
    (
        "Examples:",
        "  [bold]detgen audit out[/]",
        "  [bold]detgen audit out moved/prompts.jsonl --json audit.json[/]",
        "  [bold]detgen audit out --target models/large --device cpu[/]",
        "",
        "Exit status: 0 nothing differs, 1 faults found, 2 wrong usage, 70 internal error, 130 interrupted.",
    )
)


def audit_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The output folder of a run.")],
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPTS]", show_default="where the manifest says", help="Where the run's prompts are now."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--model",
            metavar="MODEL",
            show_default="the run's own",
            rich_help_panel="Models",
            help="The model that wrote the run: a folder, a GGUF file or a Hugging Face name.",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    target_quant: options.TargetQuant = "none",
    trust_remote_code: options.TrustRemoteCode = False,
    threads: options.Threads = None,
    kv_memory: options.KvMemory = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Judge a finished or stopped run without generating: its manifest, files and lines, and each of its tokens.

    The number format and the quantization are the run's own unless given. On another kind of machine, or with other
    library versions, bit equality is not promised; a token within the rounding error then counts as a tie.
    """
    from detgen.engine.config import EngineConfig
    from detgen.show.progress_view import open_display
    from detgen.verify.replay.early import check_early

    display = open_display(quiet=quiet)
    with errors_shown(display):
        with display:
            config = EngineConfig(
                target=target,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                threads=threads,
                kv_memory=kv_memory,
                trust_remote_code=trust_remote_code,
            )
            check_early(out, config, prompts, display)
            load_torch(display)
            from detgen.verify.replay.audit import audit_run

            result = audit_run(out, config, prompts, display)
        from detgen.show.audit_view import show_audit

        show_audit(result, out)
    conclude(result.as_dict(), json_file, display)
