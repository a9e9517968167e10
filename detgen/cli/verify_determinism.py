"""`detgen verify-determinism`: the contract tried on one's own machine, and audits of finished runs.

What it does is in `detgen.determinism`, how it looks in `detgen.show.report`; both are imported inside the
command, since they bring torch and rich, and `--help` answers without them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detgen.cli import options

if TYPE_CHECKING:
    from detgen.engine.config import EngineConfig

EPILOG = "\n".join(
    (
        "Examples:",
        "  [bold]detgen verify-determinism[/]",
        "  [bold]detgen verify-determinism prompts.jsonl --target models/large --minutes 10[/]",
        "  [bold]detgen verify-determinism --axis threads --axis batch[/]",
        "  [bold]detgen verify-determinism --against out[/]",
        "",
        "Exit status: 0 all equal, 1 something differs, 2 wrong usage, 130 interrupted.",
    )
)


def verify_command(
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPTS]",
            show_default="the embedded ones",
            help="Prompts in any form that run takes. With --against, where the run's own prompts are now.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            rich_help_panel="What to do",
            help="Audit the output folder of a run: judge each token without generating.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", rich_help_panel="What to do", help="Show which row counts give the same bits."),
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            rich_help_panel="What to do",
            help="Try again what a reproduction file (--save) holds.",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            rich_help_panel="Extent",
            help="Pairs of all settings and many random combinations, or the pairs alone.",
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.01,
            show_default=False,
            rich_help_panel="Extent",
            help="Try as many combinations as fit.",
        ),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            rich_help_panel="Extent",
            help="Turn only this axis; may be given several times: batch, order, neighbours, slot, drafter,"
            " draft_tokens, verify_window, chunk, reuse, threads, process, sampling, unverified, quant.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, rich_help_panel="Extent", help="Another seed selects other settings.")
    ] = 0,
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    target_quant: options.TargetQuant = "none",
    draft_quant: options.DraftQuant = "none",
    threads: options.Threads = None,
    kv_memory: options.KvMemory = None,
    limit: options.Limit = None,
    save: Annotated[
        Path,
        typer.Option(
            metavar="FILE", rich_help_panel="Results", help="Where to write what replays a difference, if there is one."
        ),
    ] = Path("detgen-difference.json"),
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", show_default=False, rich_help_panel="Results", help="Write the result as JSON."
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Try to break the guarantee on this machine, with these models and prompts.

    A reference is generated one prompt at a time without drafts. Then everything is generated again in other batches,
    orders, neighbours, with other drafters, threads and processes, and tokens, logits and KV entries are compared
    bit for bit.
    """
    from detgen.engine.config import EngineConfig
    from detgen.errors import EngineError, RequestError
    from detgen.show.display import open_display

    modes = {"--against": against, "--probe": probe, "--replay": replay}
    extent = {"--full": full, "--minutes": minutes, "--axis": axis, "--seed": seed}
    read = {"--limit": limit} if against else {"PROMPTS": prompts, "--limit": limit}
    models = {"--target": target, "--draft": draft} if replay else {}
    _refuse_idle(modes, extent | read | models)
    for path in (json_file, save):
        _refuse_unwritable(path)
    with open_display(quiet=True) as display:
        from detgen.engine import Engine  # noqa: F401 (before other modules that import torch: it holds Ctrl-C back)
        from detgen.errors import CheckError, PromptsError

        try:
            config = EngineConfig(
                target=target,
                draft=draft,
                device=device,
                dtype=dtype,
                target_quant=target_quant,
                draft_quant=draft_quant,
                threads=threads,
                kv_memory=kv_memory,
            )
            if against is not None:
                result, equal = _audit(against, config, prompts)
            elif replay is not None:
                result, equal = _replay(replay, quiet)
            elif probe:
                result, equal = _probe(config)
            else:
                result, equal = _check(config, prompts, limit, full, seed, minutes, axis or [], save, quiet)
        except (CheckError, EngineError, PromptsError, RequestError) as error:
            display.error(options.as_typed(error))
            raise typer.Exit(options.REFUSED) from None
        except OSError as error:
            display.error(f"cannot write {error.filename or 'the result'}: {error.strerror}")
            raise typer.Exit(options.REFUSED) from None
        except KeyboardInterrupt:
            display.console.print("detgen: interrupted; nothing was concluded", soft_wrap=True)
            raise typer.Exit(options.INTERRUPTED) from None
        status = 0 if equal else options.FAILED
        try:
            if json_file is not None:
                json_file.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            display.error(f"cannot write {json_file}: {error.strerror}")
            status = status or options.REFUSED
    raise typer.Exit(status)


def _refuse_idle(modes: dict[str, Any], others: dict[str, Any]) -> None:
    """Refuse two things to do at once, and options that what is to be done does not heed.

    Raises:
        typer.BadParameter: naming them.
    """
    chosen, idle = ([name for name, given in options.items() if given] for options in (modes, others))
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} cannot be given together")
    if chosen and idle:
        raise typer.BadParameter(f"{idle[0]} has no effect with {chosen[0]}; leave it out")


def _refuse_unwritable(path: Path | None) -> None:
    """Say before the work, not behind it, that a file cannot be written.

    Raises:
        typer.BadParameter: naming it.
    """
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"cannot write {path}: it is a folder")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"cannot write {path}: there is no folder {path.absolute().parent} to write to")


def _check(
    config: EngineConfig,
    prompts: str | None,
    limit: int | None,
    full: bool,
    seed: int,
    minutes: float | None,
    axes: list[str],
    save: Path,
    quiet: bool,
) -> tuple[dict[str, Any], bool]:
    from detgen.check.session import read_pool, read_requests, run_check
    from detgen.explain import replay
    from detgen.show import report

    extent: Any = "full" if full else "quick"
    progress = report.Progress(quiet=quiet)
    pool = read_pool(read_requests(prompts, limit, progress), extent)
    session = run_check(config, pool, extent, seed, minutes, axes, progress)
    console = report.make_console()
    report.show_check(session, console)
    for finding in session.findings:
        try:
            replay.save(save, finding, session.check.config, pool, seed, session.engine.profile())
            console.print(f"detgen verify-determinism --replay {save}", soft_wrap=True)
        except OSError as error:
            console.print(f"cannot write {save}: {error.strerror}", soft_wrap=True)
    return session.as_dict(), not session.result.failures


def _replay(path: Path, quiet: bool) -> tuple[dict[str, Any], bool]:
    from detgen.explain import replay
    from detgen.show import report

    finding = replay.again(path, report.Progress(quiet=quiet))
    console = report.make_console()
    if finding is None:
        console.print("every bit equal: the difference did not show again")
        return {"equal": True, "findings": []}, True
    report.show_finding(finding, console)
    return {"equal": False, "findings": [finding.as_dict()]}, False


def _audit(folder: Path, config: EngineConfig, prompts: str | None) -> tuple[dict[str, Any], bool]:
    from dataclasses import asdict

    from detgen.audit import audit
    from detgen.engine import Engine
    from detgen.show import report

    manifest = audit.read_manifest(folder)
    engine = Engine(audit.config_of(manifest, config))
    result = audit.Audit(folder, manifest, engine, prompts).run()
    report.show_audit(result, str(folder), report.make_console())
    return {"equal": not result.faults, **asdict(result)}, not result.faults


def _probe(config: EngineConfig) -> tuple[dict[str, Any], bool]:
    from dataclasses import replace

    from detgen.check import probe_view
    from detgen.engine import Engine
    from detgen.show import report

    engine = Engine(replace(config, drafter="none", draft=None))
    found = probe_view.view(engine)
    report.show_probe(found, report.make_console())
    return {"equal": True, **engine.probe_report(), **found.as_dict()}, True
