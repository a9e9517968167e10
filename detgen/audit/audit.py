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
from detgen.prompts import Prompts, open_prompts, spooled_prompts

# Largest error of a logit by another profile's rounding, as a share of the row's largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def config_of(manifest: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """The engine that audits a run: what the caller asked for, and the run's own model where he did not."""
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
        raise CheckError(f"{folder} holds no manifest.json; give the output folder of a detgen run") from None
    except (OSError, ValueError) as error:
        raise CheckError(f"cannot read {folder / 'manifest.json'}: {error}") from None
    needed = {"detgen", "status", "input", "parameters", "profile"}
    if not isinstance(manifest, dict) or not needed <= manifest.keys():
        raise CheckError(f"{folder / 'manifest.json'} is not a manifest of a run that detgen has begun")
    return manifest


class Audit:
    """Audits one folder.

    Args:
        folder: the output folder.
        manifest: what `read_manifest` gave.
        engine: generates nothing; its passes judge.
        prompts: the prompts, where they are no longer where the manifest says; None takes those.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], engine: Engine, prompts: str | None) -> None:
        self._folder, self._manifest, self._engine = folder, manifest, engine
        self._given = prompts
        self.result = AuditResult()

    def run(self) -> AuditResult:
        """Check everything.

        Raises:
            CheckError: if the prompts cannot be had, or a file cannot be read.
        """
        self._check_files()
        self._check_profile()
        prompts = self._prompts()
        started = time.perf_counter()
        for audited in judge(self._engine, self._samples(prompts)):
            self._report(audited)
        self.result.seconds = time.perf_counter() - started
        counts = self._manifest.get("summary")
        if counts and self._manifest.get("seconds"):
            self.result.run_speed = counts["tokens"] / self._manifest["seconds"]
        return self.result

    def _check_files(self) -> None:
        """Digests of the files of a finished run, and the two files against each other."""
        for name, known in (self._manifest.get("files") or {}).items():
            path = self._folder / name
            if not path.is_file():
                self.result.add(name, "was deleted", "file")
                continue
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != known["sha256"]:
                what = f"its SHA-256 is {found[:16]}..., the manifest says {known['sha256'][:16]}..."
                self.result.add(name, what, "file")

    def _check_profile(self) -> None:
        """The manifest against the engine: another model is a fault, another profile makes ties possible."""
        mine = json.loads(json.dumps({"profile": self._engine.profile()}, default=str))
        theirs = {**self._manifest, "input": {"sha256": "", "format": ""}}
        for line in differences(theirs, {"input": theirs["input"], **mine}):
            if line.startswith("profile.target.digest"):
                what = f"the weights or the tokenizer are not the run's: {line.partition(': ')[2]}"
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
        """The run's prompts, found again and known by their digest."""
        described = self._manifest["input"]
        spool = self._folder / "stdin.jsonl"
        try:
            if self._given is None and described["path"] == "-":
                prompts = spooled_prompts(spool)
            else:
                prompts = open_prompts(self._given or described["path"])
            found = prompts.inspect().sha256
        except PromptsError as error:
            raise CheckError(f"the run's prompts are needed: {error}; give them as PROMPTS") from None
        if found != described["sha256"]:
            what = f"the input's SHA-256 is {found[:16]}..., the manifest says {described['sha256'][:16]}..."
            self.result.add("manifest.json", f"{what} ({prompts.given})", "file")
        return prompts

    def _samples(self, prompts: Prompts) -> Iterator[Audited]:
        """Each output line beside the prompt that it must belong to; what can be judged goes on."""
        parameters = dict(self._manifest["parameters"])
        limit = parameters.pop("limit", None)
        parameters["stop"] = tuple(parameters["stop"])
        try:
            defaults = SamplingParams(**parameters)
        except (TypeError, RequestError) as error:
            raise CheckError(f"{self._folder / 'manifest.json'}: the parameters are damaged: {error}") from None
        finished = self._manifest["status"] == "finished"
        checker = Lines(self._engine, self.result)
        lines = checker.read(self._folder, stopped=not finished)
        for item in prompts.read(defaults, limit):
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
            self.result.add(where, "stands behind the last prompt's output", "line")

    def _report(self, audited: Audited) -> None:
        """Note the tokens that are not what the logits give."""
        tokenizer = self._engine.tokenizer
        for m in audited.mismatches:
            token, expected = (f"{t} {tokenizer.decode([t])!r}" for t in (m.token, m.expected))
            margin = "it is filtered out" if math.isinf(m.margin) else f"margin {m.margin:.3g}"
            what = f"token {m.position}: {token}, the logits give {expected} ({margin})"
            self.result.add(str(audited.label), what, "tie" if m.tie else "differs")
        for w in audited.wrong_logprobs:
            tie = audited.tolerance > 0 and w.error <= 2 * audited.tolerance * w.scale
            what = f"logprobs of token {w.position}: {w.written.logprob!r}, the logits give {w.expected.logprob!r}"
            if w.written.logprob == w.expected.logprob:
                what = f"logprobs of token {w.position}: the most likely tokens are others"
            self.result.add(str(audited.label), what, "tie" if tie else "line")
