"""A run from start to end: check the input, the folder and its content; generate; conclude."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import detgen
from detgen.cache import store_of_run
from detgen.engine.config import EngineConfig
from detgen.engine.engine_like import EngineLike
from detgen.engine.grammars import check_form
from detgen.engine.loading import load_engine
from detgen.engine.pieces import pieces_of
from detgen.engine.request import Chunk, Request
from detgen.engine.sources import check_sources, unapplied
from detgen.engine.stats import DraftCounts, DrafterStats
from detgen.errors import EngineError, OutputError, PromptsError, RequestError, RunError
from detgen.failing import limit_reached
from detgen.machine import peak_memory
from detgen.outputs import (
    Answers,
    FolderStore,
    OutputFolder,
    Samples,
    Totals,
    Writer,
    differences,
    differences_in_kind,
    model_stamp,
    other_arithmetic,
)
from detgen.outputs.folder import DRAFT_STORE, OUTPUTS
from detgen.outputs.manifest import RESULTS, log_name
from detgen.outputs.store import STORE, beside
from detgen.progress import Observer
from detgen.prompts import Inspection, Prompts
from detgen.run.interface import RunConfig, RunSummary, ScoreConfig, ThoughtCounts
from detgen.run.opening import opened_run
from detgen.run.results import add_results, are_wanted, make_results
from detgen.run.unloaded import describe, unloaded
from detgen.run.work import Work

# Engine settings that may differ between a run and its resumption, since no output depends on them.
_SETTINGS = (
    *("draft", "drafter", "draft_tokens", "batch_size", "draft_quant", "threads", "kv_memory"),
    *("prefix_cache", "speculative_prefill"),
)

_MOST_PROMPTS = 2**31 - 1  # more is a slip
_ATTEMPTS = 3  # to write files that something else keeps changing


def run(
    config: RunConfig | ScoreConfig,
    observer: Observer,
    *,
    build_engine: Callable[[EngineConfig], EngineLike] | None = None,
) -> RunSummary:
    """Run or score the prompts, or what is left of them, into the output folder.

    During generation, SIGINT, SIGTERM or SIGHUP ends the run at the next step, with everything finished written; a
    second signal ends it at once. Either way, the same call resumes it.

    Raises:
        RequestError: if the default form of texts is invalid.
        RunError: if the input cannot be read, the folder holds something else, or the disk is full.
        EngineError: if the engine cannot be built.
        KeyboardInterrupt: if interrupted while nothing was being generated, or twice.
    """
    if config.limit is not None and not 1 <= config.limit <= _MOST_PROMPTS:
        raise RunError(f"limit must be from 1 to {_MOST_PROMPTS}, got {config.limit}")
    if isinstance(config, RunConfig):
        check_form(config.params)
    if build_engine is None:
        check_sources(config.engine)
    show_thoughts = isinstance(config, RunConfig) and config.show_thoughts
    observer.stage("reading the prompts")
    cache = config.cache if isinstance(config, RunConfig) else None
    with (
        ExitStack() as workers,
        opened_run(config, observer) as (folder, source, inspection),
        _crashes_noted(folder),
        store_of_run(cache, folder.path, observer.message) as shared,
        ExitStack() as opened,
    ):
        manifest = _manifest(config, folder, source, inspection)
        former = None if config.overwrite else folder.manifest()
        own = None
        if former is not None:
            _check_kind(folder, former, manifest)
            if former["status"] == "finished":
                folder.check_finished(former)
                same = former["model_stamp"] is not None and former["model_stamp"] == manifest["model_stamp"]
                if (
                    same
                    and log_name(former) == log_name(manifest)
                    and not differences(former, manifest)
                    and not show_thoughts
                ):
                    add_results(config, folder, source, former, observer)
                    return _already_finished(folder, former, observer)
            if not differences(former, manifest):
                manifest |= {"created": former["created"], "seconds": former["seconds"]}
            if folder.directory.has(STORE):
                own = opened.enter_context(closing(FolderStore(folder, observer.message)))

        if build_engine:
            engine = build_engine(config.engine)
        elif config.workers:
            engine = _load_workers(config, observer, workers)
        else:
            load = partial(_load, config, observer)
            known = None if show_thoughts else unloaded(config, source, manifest, own, shared, observer, load)
            engine = known or load()
        if show_thoughts and not engine.thinks:
            name = engine.profile()["target"]["name"]
            raise RunError(
                f"--show-thoughts is for models that think while they read, and {name} does not; leave it out"
            )
        found = {"profile": engine.profile(), "draft": engine.draft_profile()}
        manifest |= _plain(found)
        if former is None:
            folder.clear()
        else:
            _check_kind(folder, former, manifest)
            changed = differences(former, manifest)
            if not changed and former["status"] == "finished" and log_name(former) == log_name(manifest):
                add_results(config, folder, source, former, observer)
                done = _already_finished(folder, former, observer)
                return replace(done, chunks=_first_chunks(config, folder, source, engine))
            _tell_former(folder, changed, own, observer)
        folder.write_manifest(manifest)
        if config.prompts == "-":
            source.path = folder.keep_received()
        folder.drop_former(manifest, piped=config.prompts == "-")
        if own is None:
            own = opened.enter_context(closing(FolderStore(folder, observer.message)))
        if not build_engine and not config.workers:
            describe(engine, manifest["model_stamp"], own, shared)
        samples = Samples(own, shared, manifest, source.name, dated=engine.dated)
        return _generate(config, folder, source, inspection, manifest, engine, samples, observer)


def _check_kind(folder: OutputFolder, former: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Refuse a folder with a run of another model, version, arithmetic or command.

    Args:
        folder: the output folder.
        former: the manifest of the run that it holds.
        manifest: this run's manifest.

    Raises:
        RunError: if it holds such a run.
    """
    found = differences_in_kind(former, manifest)
    if why := other_arithmetic(former) or (found and f"differs from this one: {'; '.join(found)}"):
        state = "a finished" if former["status"] == "finished" else "an unfinished"
        raise RunError(
            f"{folder.path} holds {state} run that {why}. Start over with --overwrite, or choose another folder with -o"
        )


def _tell_former(folder: OutputFolder, changed: list[str], own: FolderStore | None, observer: Observer) -> None:
    """Tell the user what happens to the run that the folder holds."""
    kept = own.kept if own is not None else 0
    samples = "1 finished sample" if kept == 1 else f"{kept:,} finished samples"
    if changed:
        observer.message(f"{folder.path}: {'; '.join(changed)}. {samples} can be reused; only what is new is generated")
    else:
        observer.message(f"resuming {folder.path}: {samples} kept")


def _generate(
    config: RunConfig | ScoreConfig,
    folder: OutputFolder,
    source: Prompts,
    inspection: Inspection,
    manifest: dict[str, Any],
    engine: EngineLike,
    samples: Samples,
    observer: Observer,
) -> RunSummary:
    """Generate what no store has. If files were changed meanwhile, write them again, which costs no token."""
    fresh, resumed, reused, seconds = None, 0, 0, 0.0
    pieces = pieces_of(config.engine.target, trusted=config.engine.trust_remote_code)
    for _ in range(_ATTEMPTS):
        with (
            closing(Writer(folder, samples, pieces=pieces, log=log_name(manifest))) as writer,
            writer.rescuing(),
        ):
            work = Work(config, source, engine, writer, observer, inspection.prompts)
            finished = work.run()
            if finished:
                if config.prompts == "-":
                    source.path = folder.spool  # it moves with the folder
                source.check_unchanged()
            files = writer.finish_all()
            if fresh is None:
                fresh, resumed, reused = writer.fresh, writer.resumed, writer.reused
            seconds += work.seconds
            damage = writer.damage() if finished else None
            if damage is None:
                written = writer.totals
                if finished and are_wanted(config):
                    files[RESULTS] = make_results(config, folder, source, manifest, files)
                _conclude(folder, manifest, written, files, seconds, finished)
                return RunSummary(
                    status="finished" if finished else "interrupted",
                    output=folder.path,
                    written=written,
                    fresh=fresh,
                    resumed=resumed,
                    seconds=seconds,
                    target_passes=engine.stats.target_passes,
                    peak_memory=peak_memory(),
                    sha256=files[OUTPUTS]["sha256"] if finished else None,
                    thoughts=_thought_counts(engine),
                    chunks=_first_chunks(config, folder, source, engine),
                    results=files.get(RESULTS, {}).get("sha256"),
                    reused=reused,
                )
        observer.message(f"{damage} while the run wrote it; it will be written again from the store")
    raise RunError(
        f"{damage} again and again while the run wrote it; nothing is lost: stop whatever does that, then run the same"
        " command again"
    )


def _thought_counts(engine: EngineLike) -> ThoughtCounts | None:
    stats = engine.stats
    if not engine.thinks:
        return None
    return ThoughtCounts(stats.thoughts, stats.chunks, stats.prefill_rounds, stats.passes_saved)


def _first_chunks(
    config: RunConfig | ScoreConfig, folder: OutputFolder, source: Prompts, engine: EngineLike
) -> tuple[Chunk, ...]:
    """Return the first sample as the model read it; empty if not asked for, or if the sample is an error or missing."""
    if not (isinstance(config, RunConfig) and config.show_thoughts):
        return ()
    with folder.directory.reader(OUTPUTS) as file:
        first = file.readline()
    line = json.loads(first) if first.endswith(b"\n") else {}
    request = next(source.read(config.params, 1), None)
    if "thoughts" not in line or not isinstance(request, Request):
        return ()
    return tuple(engine.chunks(request, line["token_ids"], dict(line["thoughts"])))


def _load(config: RunConfig | ScoreConfig, observer: Observer) -> EngineLike:
    """Load an engine in this process."""
    engine = load_engine(config.engine, observer)
    _name_unapplied(config, observer)
    return engine


def _load_workers(config: RunConfig | ScoreConfig, observer: Observer, opened: ExitStack) -> EngineLike:
    """Start an engine of workers, which end when `opened` is closed."""
    from detgen.workers.team import open_workers

    assert config.workers is not None
    if here := config.workers.ray is None:  # a cluster's nodes fetch what they need
        check_sources(config.engine, observer)
    engine = opened.enter_context(open_workers(config.workers, config.engine, observer))
    if here:
        _name_unapplied(config, observer)
    return engine


def _name_unapplied(config: RunConfig | ScoreConfig, observer: Observer) -> None:
    """Name the settings in the target's folder that detgen does not apply."""
    if isinstance(config, RunConfig):
        for text in unapplied(config.engine, config.params, observer):
            observer.message(text)


@contextmanager
def _crashes_noted(folder: OutputFolder) -> Iterator[None]:
    """Keep the traceback of an internal error in the folder; notes on the error say what is kept, and where."""
    try:
        yield
    except (EngineError, OutputError, PromptsError, RequestError, RunError):
        raise
    except Exception as error:
        if limit_reached(error) is None and (path := folder.note_crash(traceback.format_exc())):
            error.add_note(f"the traceback is in {path}")
        if folder.directory.has(STORE):
            error.add_note("what was finished is kept: run the same command again to resume")
        raise


def _manifest(
    config: RunConfig | ScoreConfig, folder: OutputFolder, source: Prompts, inspection: Inspection
) -> dict[str, Any]:
    begun = {}
    place = config.prompts.partition("?")[0]  # without the options of a dataset
    if config.prompts != "-" and not os.path.isabs(place) and os.path.exists(place):
        # Seen from the output folder, so that both can be moved together.
        begun["folder"] = os.path.relpath(os.getcwd(), os.path.realpath(folder.path))
    return _plain(
        {
            "detgen": detgen.__version__,
            **({} if isinstance(config, RunConfig) else {"command": "score"}),
            "status": "running",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "input": {
                "path": config.prompts,
                **begun,
                "format": source.format,
                "sha256": inspection.sha256,
                "prompts": inspection.prompts,
                "prompt_column": config.prompt_column,
            },
            "parameters": config.parameters(),
            **({"acceptance_log": config.acceptance_log} if isinstance(config, RunConfig) else {}),
            "settings": {name: getattr(config.engine, name) for name in _SETTINGS} | _workers(config),
            "model": config.engine.target,
            **({} if config.engine.adapter is None else {"adapter": config.engine.adapter}),
            "model_stamp": model_stamp(config.engine),
            "seconds": 0.0,
        }
    )


def _workers(config: RunConfig | ScoreConfig) -> dict[str, int | None]:
    return {} if config.workers is None else {"workers": config.workers.number}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return a value as it will be read back from the manifest."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _conclude(
    folder: OutputFolder,
    manifest: dict[str, Any],
    written: Totals,
    files: dict[str, dict[str, Any]],
    seconds: float,
    finished: bool,
) -> None:
    manifest |= {
        "status": "finished" if finished else "interrupted",
        "seconds": round(manifest["seconds"] + seconds, 3),
        "summary": written.summary(),
    }
    if finished:
        manifest["files"] = files
    folder.write_manifest(manifest)


def _already_finished(folder: OutputFolder, manifest: dict[str, Any], observer: Observer) -> RunSummary:
    if any(folder.directory.has(name) for name in (DRAFT_STORE, *beside(STORE))):  # a run was killed at its very end
        FolderStore(folder, observer.message).close()
    folder.drop_drafts()
    counts = {name: count for name, count in manifest["summary"].items() if name != "total"}
    counts["drafters"] = DraftCounts({name: DrafterStats(**drafts) for name, drafts in counts["drafters"].items()})
    counts["answers"] = Answers(**counts.get("answers", {}))
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
        sha256=manifest["files"][OUTPUTS]["sha256"],
        results=manifest["files"].get(RESULTS, {}).get("sha256"),
    )
