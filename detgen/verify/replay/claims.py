"""Compare what a manifest claims about a run with the folder, the prompts and the engine.

Also checks, before the engine is imported, what an audit needs: the run's manifest, model and prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen import outputs
from detgen.engine.config import EngineConfig
from detgen.engine.sources import check_sources
from detgen.errors import CheckError, OutputError, PromptsError
from detgen.outputs import Totals, differences, finished, open_plain, other_arithmetic
from detgen.outputs.batch_results import result_lines
from detgen.outputs.finished import input_place
from detgen.outputs.folder import OUTPUTS
from detgen.outputs.manifest import RESULTS
from detgen.progress import Observer
from detgen.prompts import Inspection, Prompts, open_prompts
from detgen.verify.replay.result import AuditResult

if TYPE_CHECKING:
    from detgen.engine import Engine


# Differences of profiles that are faults.
_OWN = {
    "profile.target.digest": "the weights or the tokenizer are not those of the run",
    "profile.target.adapter": "the adapter is not that of the run, which --adapter names",
}
_COUNTS = ("prompts", "samples", "errors", "tokens", "prompt_tokens")
# Largest error of a logit due to another profile's rounding, as a share of the row's largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "bfloat16-tc25": 5e-2, "bfloat16-tc24": 5e-2}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run.

    Raises:
        CheckError: if the folder holds no run, its manifest is not one of this version of detgen, or another arithmetic
            made it.
    """
    try:
        manifest = outputs.read_manifest(folder)
    except OutputError as error:
        raise CheckError(str(error)) from None
    if why := other_arithmetic(manifest):
        raise CheckError(f"{folder} {why}: audit it with the detgen that made it, or start a new folder")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any], result: AuditResult) -> None:
    """Compare the files of a finished run with their sizes and digests."""
    for name, known in manifest.get("files", {}).items():
        path = folder / name
        if not path.is_file():
            result.add(name, "is missing", "file")
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        if found != known["sha256"]:
            what = f"its SHA-256 is {found[:16]}..., the manifest says {known['sha256'][:16]}..."
            result.add(name, what, "file")
        if size != known["bytes"]:
            result.add(name, f"it has {size:,} bytes, the manifest says {known['bytes']:,}", "file")


def check_profile(engine: Engine, manifest: dict[str, Any], result: AuditResult) -> None:
    """Compare the profile with the engine's: other weights or adapters are faults, other differences allow ties."""
    mine = json.loads(json.dumps(engine.profile(), default=str))
    same: dict[str, Any] = {name: manifest[name] for name in ("command", "input") if name in manifest}
    for line in differences(manifest, {**same, "profile": mine}):
        name, _, change = line.partition(": ")
        if name in _OWN:
            result.add("manifest.json", f"{_OWN[name]}: {change}", "file")
        else:
            result.other_profile.append(line.removeprefix("profile."))


def check_input(manifest: dict[str, Any], prompts: Prompts, found: Inspection, result: AuditResult) -> None:
    """Compare the description of the input with the prompts at hand."""
    described = manifest["input"]
    if found.sha256 != described["sha256"]:
        what = f"the input's SHA-256 is {found.sha256[:16]}..., the manifest says {described['sha256'][:16]}..."
        result.add("manifest.json", f"{what} ({prompts.given})", "file")
        return
    for name, is_now in (("format", prompts.format), ("prompts", found.prompts)):
        if is_now != described[name]:
            result.add("manifest.json", f"input.{name} is {described[name]!r:.60}, the prompts give {is_now!r}", "file")


def check_results(folder: Path, manifest: dict[str, Any], prompts: Prompts, result: AuditResult) -> None:
    """If there is a `results.jsonl`, and no fault so far, compare it with what the other lines give."""
    files = manifest.get("files", {})
    if RESULTS not in files or result.faults:
        return
    digest = hashlib.sha256()
    try:
        with open(open_plain(folder / OUTPUTS), "rb") as file:
            lines = finished.output_lines(file, folder / OUTPUTS, files[OUTPUTS]["sha256"])
            for line in result_lines(manifest["profile"], finished.items_of(manifest, prompts), lines):
                digest.update(line)
    except OutputError as error:
        result.add(RESULTS, f"cannot be derived: {error}", "file")
        return
    if digest.hexdigest() != files[RESULTS]["sha256"]:
        result.add(RESULTS, "is not what outputs.jsonl gives", "file")


def check_summary(manifest: dict[str, Any], totals: Totals, result: AuditResult) -> None:
    """Compare the totals of a run with those of its lines."""
    found = totals.summary()
    said = manifest["summary"]
    wrong = [
        f"{name} is {said[name]:,}, the lines give {found[name]:,}" for name in _COUNTS if said[name] != found[name]
    ]
    drafters = {**{f"drafters.{n}": c for n, c in said["drafters"].items()}, "total": said["total"]}
    given = {**{f"drafters.{n}": c for n, c in found["drafters"].items()}, "total": found["total"]}
    drafters["answers"], given["answers"] = said.get("answers"), found.get("answers")
    if not result.logged:
        drafters, given = {"answers": drafters["answers"]}, {"answers": given["answers"]}
    for name in sorted(drafters.keys() | given.keys()):
        if drafters.get(name) != given.get(name):
            wrong.append(f"{name} is {drafters.get(name)}, the lines give {given.get(name)}")
    for what in wrong:
        result.add("manifest.json", f"summary.{what}", "file")


def check_early(folder: Path, config: EngineConfig, prompts: str | None, observer: Observer) -> None:
    """Raise if an audit cannot begin.

    Args:
        folder: the output folder.
        config: as the caller asks; where it names no model or adapter, the run's own is taken.
        prompts: as for `audit_run`.
        observer: is told about downloads.

    Raises:
        CheckError: if the folder holds no run, or its prompts are not where they should be.
            EngineError: if the model cannot be loaded.
    """
    manifest = read_manifest(folder)
    place = prompts or input_place(folder, manifest)
    if place != "-":
        with readable():
            open_prompts(place)
    check_sources(config_of(manifest, config), observer)


@contextmanager
def readable() -> Iterator[None]:
    """Inside the block, turn errors of reading the run's prompts into CheckError, with the remedy."""
    try:
        yield
    except PromptsError as error:
        raise CheckError(f"cannot read the run's prompts: {error}; name them as PROMPTS") from None


def config_of(manifest: dict[str, Any], config: EngineConfig) -> EngineConfig:
    """Return the configuration of the auditing engine: the caller's, completed by the run's own."""
    profile = manifest["profile"]
    changes: dict[str, Any] = {}
    if config.target is None:
        changes["target"] = manifest["model"]
    if config.adapter is None:
        changes["adapter"] = manifest.get("adapter")
    if config.target_quant == "none":
        changes["target_quant"] = profile["target"]["quant"]
    dtype = profile["dtype"]
    # Merged weights are rounded to the checkpoint's format if no other was asked for.
    kept = dtype.partition("-")[0]
    if config.dtype == "auto" and dtype in TOLERANCE and profile["target"].get("adapter_dtype", kept) == kept:
        changes["dtype"] = dtype
    if config.kv_dtype == "auto":
        changes["kv_dtype"] = profile["kv_dtype"]
    return replace(config, drafter="none", draft=None, **changes)
