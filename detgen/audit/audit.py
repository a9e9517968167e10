"""The audit of a finished or stopped run: its manifest, its files, then its lines and their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from detgen.audit.audited import Audited
from detgen.audit.claims import (
    check_files,
    check_input,
    check_profile,
    check_results,
    check_summary,
    read_manifest,
)
from detgen.audit.derived_lines import Derivation
from detgen.audit.derived_scores import ScoreDerivation
from detgen.audit.result import AuditResult
from detgen.audit.token_judging import judge
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.pieces import Pieces
from detgen.engine.request import Request
from detgen.errors import CheckError, PromptsError
from detgen.outputs import KeptSamples
from detgen.outputs.finished import items_of, prompts_of
from detgen.progress import Observer, Progress
from detgen.prompts import BadLine, Prompts, read_scores

# Largest error of a logit by another profile's rounding, as a share of the row's largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def audit_run(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> AuditResult:
    """Audit an output folder.

    Args:
        folder: the output folder.
        config: the engine that judges; the run's own model, number format and quantization where it names none.
        prompts: the run's prompts; None takes them from where the manifest says.
        observer: is told how it goes.

    Raises:
        CheckError: if the folder holds no run, its prompts cannot be read, or its manifest is damaged.
        EngineError: if the engine cannot be built.
    """
    manifest = read_manifest(folder)
    return Audit(folder, manifest, Engine(config_of(manifest, config), observer=observer), prompts).run(observer)


def config_of(manifest: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """The engine that audits a run: as the caller asks, with the run's own model where he asks for none."""
    profile = manifest["profile"]
    changes: dict[str, Any] = {}
    if config.target is None:
        changes["target"] = manifest["model"]
    if config.target_quant == "none":
        changes["target_quant"] = profile["target"]["quant"]
    if config.dtype == "auto" and profile["dtype"] in TOLERANCE:
        changes["dtype"] = profile["dtype"]
    return replace(config, drafter="none", draft=None, **changes)


class Audit:
    """Audits one folder.

    Args:
        folder: the output folder.
        manifest: what `read_manifest` returned.
        engine: generates nothing; its passes judge.
        prompts: as `audit_run` takes them.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], engine: Engine, prompts: str | None) -> None:
        self._folder, self._manifest, self._engine = folder, manifest, engine
        self._given = prompts
        self._stopped = manifest["status"] != "finished"
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
        derivation: Derivation | ScoreDerivation
        judged: Iterator[None]
        with KeptSamples(self._folder) if self._stopped else nullcontext() as kept:
            dated = self._engine.dated
            find = None if kept is None else partial(kept.find, manifest=manifest, source=prompts.name, dated=dated)
            if manifest.get("command") == "score":
                derivation = ScoreDerivation(self._engine, self._folder, prompts.name, kept=find, result=result)
                judged = derivation.check(self._scores(prompts))
            else:
                derivation = Derivation(self._engine, self._folder, prompts.name, kept=find, result=result)
                judged = map(self._report, judge(self._engine, derivation.check(items_of(manifest, prompts))))
            started = time.perf_counter()
            for done, _ in enumerate(judged, start=1):
                result.seconds = time.perf_counter() - started
                figures = (f"{result.faults:,} faults",)
                observer.progress(Progress(done, None, "samples", result.seconds, figures=figures))
        if "summary" in manifest and derivation.whole:
            check_summary(manifest, derivation.totals, result)
        check_results(self._folder, manifest, prompts, Pieces(lambda: self._engine.tokenizer), result)
        if manifest["seconds"] and "summary" in manifest:
            result.run_speed = manifest["summary"]["tokens"] / manifest["seconds"]
        return result

    def _prompts(self) -> Prompts:
        """The run's prompts, if their digest is the manifest's; others are a fault."""
        try:
            prompts = prompts_of(self._folder, self._manifest, self._given)
            found = prompts.inspect()
        except PromptsError as error:
            raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None
        check_input(self._manifest, prompts, found, self.result)
        return prompts

    def _scores(self, prompts: Prompts) -> Iterator[Request | BadLine]:
        """The prompts of a folder of scores."""
        parameters = self._manifest["parameters"]
        return read_scores(prompts, parameters["limit"], echo=parameters["echo"])

    def _report(self, audited: Audited) -> None:
        """Note the tokens and log-probabilities that are not what the logits give."""
        tokenizer = self._engine.tokenizer
        for m in audited.mismatches:
            token, expected = (f"{t} {tokenizer.decode([t])!r}" for t in (m.token, m.expected))
            margin = "a filter drops it" if math.isinf(m.margin) else f"margin {m.margin:.3g}"
            what = f"token {m.position} is {token}, the logits give {expected} ({margin})"
            self.result.add(audited.label, what, "tie" if m.tie else "differs")
        for what in audited.wrong_thoughts:
            self.result.add(audited.label, what, "line")
        for what, tie in audited.wrong_logprobs:
            self.result.add(audited.label, what, "tie" if tie else "line")
        for what, tie in audited.wrong_scores:
            seq = audited.sequence
            place = f"prompt {seq.request.index}, sample {seq.sample}"
            self.result.add("acceptance.jsonl", f"{place}, {what}", "tie" if tie else "line")
