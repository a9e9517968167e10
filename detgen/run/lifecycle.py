"""A run from its start to its end: check the input, the folder and what it holds; generate; conclude."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import detgen
from detgen.engine.config import EngineConfig
from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.errors import OutputError, PromptsError, RunError
from detgen.machine import peak_memory
from detgen.outputs import OutputFolder, Totals, Writer, differences, model_stamp
from detgen.progress import Observer
from detgen.prompts import Inspection, Prompts, open_prompts, spooled_prompts
from detgen.run.interface import EngineLike, RunConfig, RunSummary
from detgen.run.work import Work

# Engine settings that may differ between a run and its resumption, since no output depends on them.
_SETTINGS = ("draft", "drafter", "draft_tokens", "verify_window", "batch_size", "draft_quant", "threads", "kv_memory")


def run(
    config: RunConfig, observer: Observer, *, build_engine: Callable[[EngineConfig], EngineLike] | None = None
) -> RunSummary:
    """Run the prompts, or what is left of them, into the output folder.

    While it generates, SIGINT or SIGTERM ends it at the next step, with everything written that is finished; a second
    one ends it at once. Either way the same call resumes it.

    Raises:
        RunError: an input that cannot be read, a folder that holds something else, a full disk.
        EngineError: from building the engine.
        KeyboardInterrupt: interrupted while nothing was being generated, or twice.
    """
    if config.limit is not None and config.limit < 1:
        raise RunError(f"limit must be at least 1, got {config.limit}")
    with _opened(config) as (folder, source, inspection):
        manifest = _manifest(config, source, inspection)
        former = None if config.overwrite else folder.manifest()
        if former is not None:
            _check_same(folder, former, manifest)
            if former["status"] == "finished":
                folder.check_finished(former)
                if former["model_stamp"] is not None and former["model_stamp"] == manifest["model_stamp"]:
                    return _already_finished(folder, former)

        engine = (build_engine or _load_engine)(config.engine)
        found = {"profile": engine.profile(), "probe": engine.probe_report(), "draft": engine.draft_profile()}
        manifest |= _plain(found)
        if former is None:
            folder.clear()
        else:
            _check_same(folder, former, manifest)
            if former["status"] == "finished":
                return _already_finished(folder, former)
            manifest |= {"created": former["created"], "seconds": former["seconds"]}
        folder.write_manifest(manifest)
        if config.prompts == "-":
            source = spooled_prompts(folder.keep_received())

        with closing(Writer(folder)) as writer:
            if former is not None:
                observer.message(f"resuming {folder.path}: {writer.kept:,} finished samples kept")
            work = Work(config, source, engine, writer, observer, inspection.prompts)
            finished = work.run()
            if finished:
                source.check_unchanged()
            return _conclude(folder, manifest, engine, writer, work.seconds, finished)


def _load_engine(config: EngineConfig) -> EngineLike:
    from detgen.engine import Engine

    return Engine(config)


@contextmanager
def _opened(config: RunConfig) -> Iterator[tuple[OutputFolder, Prompts, Inspection]]:
    """The output folder, locked, and the input, inspected; whatever is wrong with them is a `RunError`."""
    try:
        if config.prompts == "-":
            with OutputFolder(config.output or Path("stdin-out")) as folder:
                source = _receive(folder, overwrite=config.overwrite)
                yield folder, source, source.inspect()
        else:
            source = open_prompts(config.prompts)
            output = config.output or Path(f"{source.stem}-out")
            _check_apart(source, output)
            inspection = source.inspect()
            with OutputFolder(output) as folder:
                yield folder, source, inspection
    except (PromptsError, OutputError) as error:
        raise RunError(str(error)) from error


def _receive(folder: OutputFolder, *, overwrite: bool) -> Prompts:
    """What is piped in; if nothing is, what was piped into the run that is to be resumed."""
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if piped and (received := folder.receive(sys.stdin.buffer)):
        return spooled_prompts(received)
    if folder.spool.exists() and not overwrite:
        return spooled_prompts(folder.spool)
    raise RunError("no prompts on standard input; pipe JSON lines into detgen, or name a file")


def _check_apart(source: Prompts, output: Path) -> None:
    """Keep a run from writing into its own input."""
    if source.path is None:
        return
    place, target = source.path.resolve(), output.resolve()
    if target == place.parent if place.is_file() else target.is_relative_to(place):
        raise RunError(f"the output folder {output} is where the prompts are; choose another one with -o")


def _manifest(config: RunConfig, source: Prompts, inspection: Inspection) -> dict[str, Any]:
    return _plain(
        {
            "detgen": detgen.__version__,
            "status": "running",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "input": {
                "path": config.prompts,
                "format": source.format,
                "sha256": inspection.sha256,
                "prompts": inspection.prompts,
            },
            "parameters": {**asdict(config.params), "limit": config.limit},
            "settings": {name: getattr(config.engine, name) for name in _SETTINGS},
            "model": config.engine.target,
            "model_stamp": model_stamp(config.engine),
            "seconds": 0.0,
        }
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As it will be read back from the manifest."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _check_same(folder: OutputFolder, former: dict[str, Any], manifest: dict[str, Any]) -> None:
    if found := differences(former, manifest):
        state = "a finished" if former["status"] == "finished" else "an unfinished"
        raise RunError(
            f"{folder.path} holds {state} run that differs from this one: {'; '.join(found)}."
            " Start over with --overwrite, or choose another folder with -o"
        )


def _conclude(
    folder: OutputFolder, manifest: dict[str, Any], engine: EngineLike, writer: Writer, seconds: float, finished: bool
) -> RunSummary:
    files = writer.finish_all()
    written = writer.totals
    manifest |= {
        "status": "finished" if finished else "interrupted",
        "deterministic": bool(manifest["probe"]["row_invariant"]),
        "seconds": round(manifest["seconds"] + seconds, 3),
        "summary": {**asdict(written), "total": asdict(written.drafters.total())},
    }
    if finished:
        manifest["files"] = files
    folder.write_manifest(manifest)
    if finished:
        folder.remove_journal()
    return RunSummary(
        status=manifest["status"],
        output=folder.path,
        written=written,
        fresh=writer.fresh,
        resumed=writer.resumed,
        seconds=seconds,
        target_passes=engine.stats.target_passes,
        peak_memory=peak_memory(),
        sha256=files["outputs.jsonl"]["sha256"] if finished else None,
        deterministic=manifest["deterministic"],
    )


def _already_finished(folder: OutputFolder, manifest: dict[str, Any]) -> RunSummary:
    folder.remove_journal()  # a crash may have come between the manifest and this
    counts = {name: count for name, count in manifest["summary"].items() if name != "total"}
    counts["drafters"] = DraftCounts({name: DrafterStats(**drafts) for name, drafts in counts["drafters"].items()})
    written = Totals(**counts)
    return RunSummary(
        status="already finished",
        output=folder.path,
        written=written,
        fresh=written,
        resumed=written.samples,
        seconds=0.0,
        target_passes=0,
        peak_memory=peak_memory(),
        sha256=manifest["files"]["outputs.jsonl"]["sha256"],
        deterministic=manifest["deterministic"],
    )
