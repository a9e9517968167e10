"""The audit of a finished or stopped run: manifest, files, lines, tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detgen.determinism.auditing import Audited, Mismatch, judge
from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request, RequestError, SamplingParams
from detgen.engine.sequence import Sequence
from detgen.outputs import differences, read_entries
from detgen.prompts import BadLine, Prompts, PromptsError, open_prompts, spooled_prompts

# Largest error of a logit by another profile's rounding, as a share of the row's largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_FOUND = 100  # findings that are kept


class AuditError(ValueError):
    """A folder that cannot be audited; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as the run must have written it.

    Attributes:
        where: file, and line where there is one.
        what: in words.
        kind: "file", "line", "differs" or "tie"; a tie is no fault.
    """

    where: str
    what: str
    kind: str


@dataclass(slots=True)
class AuditResult:
    """What an audit found.

    Attributes:
        findings: the first hundred, ties among them.
        faults: all findings that are no ties.
        ties: tokens whose margin is within the tolerance, under another profile.
        differing: tokens that differ.
        samples: samples audited.
        tokens: tokens of them.
        unverified: samples of unverified requests, of which nothing is promised.
        missing: prompts that the run has not written, where it was stopped.
        other_profile: in what the profile differs; empty if bit equality is promised.
        tolerance: share of a row's largest logit within which a token is a tie.
        seconds: time taken by the tokens.
        run_speed: tokens a second of the run itself; None if unknown.
    """

    findings: list[Finding] = field(default_factory=list)
    faults: int = 0
    ties: int = 0
    differing: int = 0
    samples: int = 0
    tokens: int = 0
    unverified: int = 0
    missing: int = 0
    other_profile: list[str] = field(default_factory=list)
    tolerance: float = 0.0
    seconds: float = 0.0
    run_speed: float | None = None

    def add(self, where: str, what: str, kind: str) -> None:
        """Note a finding."""
        if len(self.findings) < _FOUND:
            self.findings.append(Finding(where, what, kind))
        self.ties += kind == "tie"
        self.differing += kind == "differs"
        self.faults += kind != "tie"


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
        AuditError: if the folder holds no run.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        raise AuditError(f"{folder} holds no manifest.json; give the output folder of a detgen run") from None
    except (OSError, ValueError) as error:
        raise AuditError(f"cannot read {folder / 'manifest.json'}: {error}") from None
    needed = {"detgen", "status", "input", "parameters", "profile"}
    if not isinstance(manifest, dict) or not needed <= manifest.keys():
        raise AuditError(f"{folder / 'manifest.json'} is not a manifest of a run that detgen has begun")
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
            AuditError: if the prompts cannot be had, or a file cannot be read.
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
            raise AuditError(f"the run's prompts are needed: {error}; give them as PROMPTS") from None
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
            raise AuditError(f"{self._folder / 'manifest.json'}: the parameters are damaged: {error}") from None
        lines = self._lines()
        for item in prompts.read(defaults, limit):
            for expected, label in self._expected(item):
                found = next(lines, None)
                if found is None:
                    if self._manifest["status"] == "finished":
                        self.result.add("outputs.jsonl", f"ends before {label}", "line")
                        return
                    self.result.missing += 1
                    continue
                audited = self._line(*found, expected, label, item)
                if audited is not None:
                    yield audited
        for where, _ in lines:
            self.result.add(where, "stands behind the last prompt's output", "line")

    def _expected(self, item: Request | BadLine) -> list[tuple[Sequence | str, str]]:
        """What the lines of a prompt must be: a sequence, or an error."""
        if isinstance(item, BadLine):
            return [(item.error, f"prompt {item.index}, sample 0")]
        try:
            sequences = self._engine.sequences(item)
        except RequestError as error:
            return [(str(error), f"prompt {item.index}, sample 0")]
        return [(seq, f"prompt {item.index}, sample {seq.sample}") for seq in sequences]

    def _lines(self) -> Iterator[tuple[str, Any]]:
        """The output lines in order, then those that only the journal of a stopped run has."""
        last = (-1, -1)
        path = self._folder / "outputs.jsonl"
        stopped = self._manifest["status"] != "finished"
        if path.is_file():
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if stopped and not line.endswith(b"\n"):
                        break  # torn by a kill; the journal has it
                    try:
                        parsed = json.loads(line)
                        last = (parsed["index"], parsed["sample"])
                    except (ValueError, TypeError, KeyError):
                        self.result.add(f"outputs.jsonl:{number}", "is no output line", "line")
                        continue
                    yield f"outputs.jsonl:{number}", parsed
        journal = self._folder / "journal.jsonl"
        if stopped and journal.is_file():
            entries = {(e.index, e.sample): e.output for e in read_entries(journal)}
            for key in sorted(k for k in entries if k > last):
                yield "journal.jsonl", json.loads(entries[key])

    def _line(
        self, where: str, line: Any, expected: Sequence | str, label: str, item: Request | BadLine
    ) -> Audited | None:
        """Check all of a line but its tokens' choice; None if there are none to judge."""
        place = f"prompt {line.get('index')}, sample {line.get('sample')}"
        if place != label or line.get("id") != item.id:
            self.result.add(where, f"is of {place}, where {label} (id {item.id!r}) must stand", "line")
            return None
        if isinstance(expected, str):
            if not str(line.get("error", "")).endswith(expected):
                self.result.add(where, f"must be the error {expected!r}", "line")
            return None
        if "error" in line:
            self.result.add(where, f"is an error, but the prompt can run: {line['error']}", "line")
            return None
        tokens = line.get("token_ids")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) for t in tokens):
            self.result.add(where, "has no tokens", "line")
            return None
        if not expected.deterministic:
            self.result.unverified += 1
            return None
        self.result.samples += 1
        self.result.tokens += len(tokens)
        for name, want in self._fields(expected, tokens).items():
            if line.get(name) != want:
                what = f"{name} is {line.get(name)!r}, its tokens give {want!r}"
                self.result.add(where, what[:300], "line")
        return Audited(expected, tokens, where)

    def _fields(self, seq: Sequence, tokens: list[int]) -> dict[str, Any]:
        """What the other fields of a line must be, given its tokens."""
        stopping = self._engine.stopping
        prompt = list(seq.tokens)
        seq.finish_reason = None
        for count, token in enumerate(tokens, start=1):
            ended = stopping.ends(seq, [token])
            seq.tokens.append(token)
            if ended and count < len(tokens):
                seq.finish_reason = None
                break
        fields = {
            "text": stopping.text(seq),
            "finish_reason": seq.finish_reason,
            "prompt_tokens": seq.prompt_length,
            "completion_tokens": seq.generated,
            "seed": seq.request.params.seed,
        }
        seq.tokens[:] = prompt
        return fields

    def _report(self, audited: Audited) -> None:
        """Note the tokens that are not what the logits give."""
        tokenizer = self._engine.tokenizer
        for m in audited.mismatches:
            tie = bool(self.result.other_profile) and m.margin <= self._allowed(audited, m)
            words = " and ".join(f"{t} {tokenizer.decode([t])!r}" for t in (m.token, m.expected))
            what = f"token {m.position}: {words.replace(' and ', ', the logits give ', 1)} (margin {m.margin:.3g})"
            self.result.add(str(audited.label), what, "tie" if tie else "differs")

    def _allowed(self, audited: Audited, mismatch: Mismatch) -> float:
        """The margin under which another profile's rounding explains a mismatch."""
        temperature = audited.sequence.request.params.temperature or 1.0
        return self.result.tolerance * mismatch.scale / temperature
