"""Audit a finished or stopped run: its manifest, its files, then its lines and their tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.models.gguf.loading import asking
from detgen.outputs import KeptSamples
from detgen.outputs.finished import items_of, prompts_of
from detgen.outputs.manifest import log_name
from detgen.progress import Observer, Progress
from detgen.prompts import BadLine, Prompts, read_scores
from detgen.verify.replay.claims import (
    TOLERANCE,
    check_files,
    check_input,
    check_profile,
    check_results,
    check_summary,
    config_of,
    read_manifest,
    readable,
)
from detgen.verify.replay.lines import Kept, Replay
from detgen.verify.replay.result import AuditResult
from detgen.verify.replay.scores import ScoreReplay
from detgen.verify.replay.texts import TextReplay


def audit_run(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> AuditResult:
    """Audit an output folder.

    Args:
        folder: the output folder.
        config: the judging engine's; where it names no model, adapter, number format or quantization, the run's own is
            taken.
        prompts: the run's prompts; None takes them from the place that the manifest names.
        observer: receives progress.

    Raises:
        CheckError: if the folder holds no run, its prompts cannot be read, or its manifest is damaged.
        EngineError: if the engine cannot be built.
    """
    manifest = read_manifest(folder)
    with asking():  # the run may have compared nothing
        engine = Engine(config_of(manifest, config), observer=observer)
    return Audit(folder, manifest, engine, prompts).run(observer)


class Audit:
    """Audits one folder.

    Args:
        folder: the output folder.
        manifest: the manifest, from `read_manifest`.
        engine: its passes judge; it generates nothing.
        prompts: as for `audit_run`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], engine: Engine, prompts: str | None) -> None:
        self._folder, self._manifest, self._engine = folder, manifest, engine
        self._given = prompts
        self.result = AuditResult()

    def run(self, observer: Observer) -> AuditResult:
        """Check everything.

        Raises:
            CheckError: if the prompts cannot be read, or need more memory than the engine has.
        """
        result, manifest = self.result, self._manifest
        check_files(self._folder, manifest, result)
        check_profile(self._engine, manifest, result)
        dtypes = {manifest["profile"]["dtype"], self._engine.profile()["dtype"]}
        result.tolerance = max(TOLERANCE.get(d, 5e-2) for d in dtypes)
        prompts = self._prompts()
        scores = manifest.get("command") == "score"
        self._engine.reset_prefix_cache()  # what it read before is not to be trusted either
        items = self._scores(prompts) if scores else items_of(manifest, prompts)
        dated, pieces = self._engine.dated, self._engine.pieces
        with KeptSamples(self._folder) if manifest["status"] != "finished" else nullcontext() as store:
            kept = None
            if store is not None:
                kept = Kept(partial(store.find, manifest=manifest, source=prompts.name, dated=dated), pieces)
            log = log_name(manifest)
            result.logged = scores or log is not None
            replay: Replay = (ScoreReplay if scores else TextReplay)(
                self._engine, self._folder, prompts.name, log=log, kept=kept, result=result
            )
            started = time.perf_counter()
            for done, _ in enumerate(replay.check(items), start=1):
                result.seconds = time.perf_counter() - started
                figures = (f"{result.faults:,} faults",)
                observer.progress(Progress(done, None, "samples", result.seconds, figures=figures))
        if "summary" in manifest and replay.whole:
            check_summary(manifest, replay.totals, result)
        check_results(self._folder, manifest, prompts, result)
        if manifest["seconds"] and "summary" in manifest:
            result.run_speed = manifest["summary"]["tokens"] / manifest["seconds"]
        return result

    def _prompts(self) -> Prompts:
        """Return the run's prompts; a digest other than the manifest's is a fault."""
        with readable():
            prompts = prompts_of(self._folder, self._manifest, self._given)
            found = prompts.inspect()
        check_input(self._manifest, prompts, found, self.result)
        return prompts

    def _scores(self, prompts: Prompts) -> Iterator[Request | BadLine]:
        """Read the prompts of a folder of scores."""
        parameters = self._manifest["parameters"]
        return read_scores(prompts, parameters["limit"], echo=parameters["echo"])
