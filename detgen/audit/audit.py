"""The audit of a finished or stopped run: its manifest, its files, then its lines and their tokens."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from detgen.audit.judging import Audited, judge
from detgen.audit.lines import Lines
from detgen.audit.result import AuditResult
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import SamplingParams
from detgen.errors import CheckError, PromptsError, RequestError
from detgen.outputs import differences
from detgen.progress import Observer, Progress
from detgen.prompts import Prompts, open_prompts, spooled_prompts

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
        CheckError: if the folder holds no run, its prompts cannot be read, or its parameters are damaged.
        EngineError: if the engine cannot be built.
    """
    manifest = read_manifest(folder)
    return Audit(folder, manifest, Engine(config_of(manifest, config)), prompts).run(observer)


def config_of(manifest: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """The engine that audits a run: as the caller asks, with the run's own model where he asks for none."""
    profile = manifest.get("profile") or {}
    changes: dict[str, Any] = {}
    if config.target is None:
        changes["target"] = manifest.get("model")
    if config.target_quant == "none":
        changes["target_quant"] = profile.get("target", {}).get("quant", "none")
    if config.dtype == "auto" and profile.get("dtype") in TOLERANCE:
        changes["dtype"] = profile["dtype"]
    return replace(config, drafter="none", draft=None, **changes)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        CheckError: if the folder holds no run.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckError(f"{folder} has no manifest.json; give the output folder of a detgen run") from None
    except (OSError, ValueError) as error:
        raise CheckError(f"cannot read {folder / 'manifest.json'}: {error}") from None
    needed = {"detgen", "status", "input", "parameters", "profile"}
    if not isinstance(manifest, dict) or not needed <= manifest.keys():
        raise CheckError(f"{folder / 'manifest.json'} is not the manifest of a detgen run")
    return manifest


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
        self.result = AuditResult()

    def run(self, observer: Observer) -> AuditResult:
        """Check everything.

        Raises:
            CheckError: if the prompts cannot be read, or the parameters are damaged.
        """
        result = self.result
        self._check_files()
        self._check_profile()
        prompts = self._prompts()
        started = time.perf_counter()
        for done, audited in enumerate(judge(self._engine, self._samples(prompts)), start=1):
            self._report(audited)
            result.seconds = time.perf_counter() - started
            observer.progress(Progress(done, None, "samples", result.seconds, figures=(f"{result.faults:,} faults",)))
        counts = self._manifest.get("summary")
        if counts and self._manifest.get("seconds"):
            result.run_speed = counts["tokens"] / self._manifest["seconds"]
        return result

    def _check_files(self) -> None:
        """The files of a finished run against their digests in the manifest."""
        for name, known in (self._manifest.get("files") or {}).items():
            path = self._folder / name
            if not path.is_file():
                self.result.add(name, "is missing", "file")
                continue
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != known["sha256"]:
                what = f"its SHA-256 is {found[:16]}..., the manifest says {known['sha256'][:16]}..."
                self.result.add(name, what, "file")

    def _check_profile(self) -> None:
        """The manifest against the engine: other weights are a fault, another profile makes ties possible."""
        mine = json.loads(json.dumps({"profile": self._engine.profile()}, default=str))
        theirs = {**self._manifest, "input": {"sha256": "", "format": ""}}
        for line in differences(theirs, {"input": theirs["input"], **mine}):
            if line.startswith("profile.target.digest"):
                what = f"the weights or the tokenizer are not those of the run: {line.partition(': ')[2]}"
                self.result.add("manifest.json", what, "file")
            else:
                self.result.other_profile.append(line.removeprefix("profile."))
        mine_threads, theirs_threads = self._engine.probe.threads, self._manifest["probe"]["threads"]
        if list(mine_threads) != list(theirs_threads):
            self.result.other_profile.append(f"probed threads: {theirs_threads} -> {list(mine_threads)}")
        if not self._manifest["probe"]["row_invariant"]:
            self.result.other_profile.append("the run was not deterministic (--allow-nondeterministic)")
        dtypes = {self._manifest["profile"]["dtype"], mine["profile"]["dtype"]}
        self.result.tolerance = max(TOLERANCE.get(d, 5e-2) for d in dtypes)

    def _prompts(self) -> Prompts:
        """The run's prompts, if their digest is the manifest's; others are a fault."""
        described = self._manifest["input"]
        spool = self._folder / "stdin.jsonl"
        column = described.get("prompt_column")
        try:
            if self._given is None and described["path"] == "-":
                prompts = spooled_prompts(spool, column)
            else:
                prompts = open_prompts(self._given or described["path"], column)
            found = prompts.inspect().sha256
        except PromptsError as error:
            raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None
        if found != described["sha256"]:
            what = f"the input's SHA-256 is {found[:16]}..., the manifest says {described['sha256'][:16]}..."
            self.result.add("manifest.json", f"{what} ({prompts.given})", "file")
        return prompts

    def _samples(self, prompts: Prompts) -> Iterator[Audited]:
        """Check each output line against its prompt; the samples whose tokens can be judged."""
        parameters = dict(self._manifest["parameters"])
        limit = parameters.pop("limit", None)
        seed_per_line, echo = (bool(parameters.pop(name, False)) for name in ("seed_per_line", "echo"))
        try:
            defaults = SamplingParams(**parameters)
        except (TypeError, RequestError) as error:
            raise CheckError(f"{self._folder / 'manifest.json'}: the parameters are damaged: {error}") from None
        finished = self._manifest["status"] == "finished"
        checker = Lines(self._engine, self.result)
        lines = checker.read(self._folder, stopped=not finished)
        for item in prompts.read(defaults, limit, echo=echo, seed_per_line=seed_per_line):
            for expected, label in checker.expected(item):
                found = next(lines, None)
                if found is None:
                    if finished:
                        self.result.add("outputs.jsonl", f"ends before {label}", "line")
                        return
                    self.result.missing += 1
                    continue
                audited = checker.check(*found, expected, label, item)
                if audited is not None:
                    yield audited
        for where, _ in lines:
            self.result.add(where, "comes after the last prompt's output", "line")

    def _report(self, audited: Audited) -> None:
        """Note the tokens and log-probabilities that are not what the logits give."""
        tokenizer = self._engine.tokenizer
        for m in audited.mismatches:
            token, expected = (f"{t} {tokenizer.decode([t])!r}" for t in (m.token, m.expected))
            margin = "a filter drops it" if math.isinf(m.margin) else f"margin {m.margin:.3g}"
            what = f"token {m.position} is {token}, the logits give {expected} ({margin})"
            self.result.add(audited.label, what, "tie" if m.tie else "differs")
        for what, tie in audited.wrong_logprobs:
            self.result.add(audited.label, what, "tie" if tie else "line")
