"""`detgen audit` judges an existing run, `detgen verify-determinism` tries to break the guarantee.

Both are implemented in `detgen.verify`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detgen.cli.answering import JsonFile, MovedPrompts, answered, import_engine, writable
from detgen.cli.declared import command, epilog
from detgen.declaring import Part
from detgen.engine.config import EngineConfig
from detgen.verify.perturb.interface import CheckConfig

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

AUDIT_EPILOG = epilog(
    "detgen audit out",
    "detgen audit out moved/prompts.jsonl --json audit.json",
    "detgen audit out --target models/large --device cpu",
    status="0 nothing differs, 1 faults found, 2 refused",
)
VERIFY_EPILOG = epilog(
    "detgen verify-determinism",
    "detgen verify-determinism prompts.jsonl --target models/large --minutes 10",
    "detgen verify-determinism --axis threads --axis draft-tokens",
    status="0 all equal, 1 something differs, 2 refused",
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
    """Judge a run and show the findings. Return the exit status."""
    from detgen.verify.replay.claims import check_early

    with display:
        check_early(out, engine, prompts, display)
        import_engine(display)
        from detgen.verify.replay.audit import audit_run

        result = audit_run(out, engine, prompts, display)
    from detgen.show.answers import show_audit

    if result.faults or not display.quiet:
        show_audit(result, out)
    return answered(result.as_dict(), json_file, display)


@command
def verify_command(
    config: CheckConfig,
    against: Annotated[
        Path | None,
        typer.Option(metavar="OUT", show_default=False, help="The same as detgen audit OUT [PROMPTS]."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Reproduce the difference in a file written by --save."),
    ] = None,
    save: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            callback=writable,
            rich_help_panel="Input and output",
            help="If something differs, write what --replay needs to this file.",
        ),
    ] = Path("detgen-difference.json"),
    json_file: JsonFile = None,
    *,
    display: QuietDisplay,
) -> int:
    """Try to break the guarantee on this machine, with these models and prompts.

    A reference is generated one prompt at a time without drafts. Then everything is generated again in other batches
    and orders, beside other neighbours, with other drafters, threads and processes; tokens, logits and KV entries are
    compared bit for bit.
    """
    given = {f"--{name}": getattr(config, name) for name in ("full", "minutes", "axis", "seed", "limit")}
    given["--draft"] = config.engine.draft
    if against is None:
        given = {"PROMPTS": config.prompts, **given}
        given |= {"--target": config.engine.target, "--adapter": config.engine.adapter}
    _refuse_ignored({"--against": against, "--replay": replay}, given)
    if against is not None:
        return audit(against, config.prompts, config.engine, json_file, display)
    if replay is not None:
        answer = _replay(replay, display, trusted=config.engine.trust_remote_code)
    else:
        answer = _check(config, save, display)
    return answered(answer, json_file, display)


def _refuse_ignored(modes: dict[str, Any], others: dict[str, Any]) -> None:
    """Raise for two modes at once, and for options that a mode ignores.

    Raises:
        typer.BadParameter: with their names.
    """
    chosen, ignored = ([name for name, value in options.items() if value] for options in (modes, others))
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} cannot be given together")
    if chosen and ignored:
        raise typer.BadParameter(f"{ignored[0]} has no effect with {chosen[0]}; leave it out")


def _check(config: CheckConfig, save: Path, display: QuietDisplay) -> dict[str, Any]:
    began = time.monotonic()
    from detgen.engine.sources import check_sources
    from detgen.prompts import open_prompts
    from detgen.verify.perturb.selecting import read_axes

    with display:
        read_axes(config.axis)
        if config.prompts is not None:
            open_prompts(config.prompts)
        check_sources(config.engine, display)
        import_engine(display)
        from detgen.verify.explain.explaining import explain
        from detgen.verify.perturb.whole import run_check

        with run_check(config, display, began) as check:
            found = [explain(check, failure) for failure in check.result.failures[:1]]
    from detgen.show.check_view import show_check
    from detgen.verify.explain.reproduction import save_replay

    saved = [save_replay(save, explanation, check) for explanation in found]
    if found or not display.quiet:
        show_check(check, found, saved)
    return {**check.as_dict(), "findings": [explanation.as_dict() for explanation in found]}


def _replay(path: Path, display: QuietDisplay, *, trusted: bool) -> dict[str, Any]:
    from detgen.errors import CheckError

    with display:
        if not path.exists():
            raise CheckError(f"cannot read {path}: there is no such file")
        import_engine(display)
        from detgen.verify.explain.reproduction import again

        found = again(path, display, trusted=trusted)
    from detgen.show.check_view import show_replay

    if found or not display.quiet:
        show_replay(found)
    return {"equal": found is None, "findings": [found.as_dict()] if found else []}


COMMANDS = {"audit": (audit_command, AUDIT_EPILOG), "verify-determinism": (verify_command, VERIFY_EPILOG)}
