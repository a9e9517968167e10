"""Writes the results of a run in the format of the OpenAI batch API, if asked for."""

from __future__ import annotations

from typing import Any, TypeGuard

from detgen.outputs import OutputFolder
from detgen.outputs.batch_results import write_results
from detgen.outputs.finished import items_of
from detgen.outputs.folder import OUTPUTS
from detgen.outputs.manifest import RESULTS
from detgen.progress import Observer
from detgen.prompts import Prompts
from detgen.run.interface import RunConfig, ScoreConfig


def make_results(
    config: RunConfig, folder: OutputFolder, source: Prompts, manifest: dict[str, Any], files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Write `results.jsonl` of a run whose `outputs.jsonl` is complete.

    Args:
        config: the run's settings.
        folder: the run's folder.
        source: the prompts.
        manifest: the run's manifest.
        files: "sha256" and "bytes" by file, at least for `outputs.jsonl`.

    Returns:
        "sha256" and "bytes".

    Raises:
        OutputError: if it cannot be written.
        EngineError: if the tokenizer is needed and cannot be loaded.
        PromptsError: if the prompts cannot be read or have changed.
    """
    found = write_results(folder, manifest, files[OUTPUTS]["sha256"], items_of(manifest, source))
    source.check_unchanged()
    return found


def are_wanted(config: RunConfig | ScoreConfig) -> TypeGuard[RunConfig]:
    """Return whether results are asked for; scores have none."""
    return isinstance(config, RunConfig) and config.output_format == "openai"


def add_results(
    config: RunConfig | ScoreConfig, folder: OutputFolder, source: Prompts, manifest: dict[str, Any], observer: Observer
) -> None:
    """Write `results.jsonl` of a finished run if it is asked for and missing or changed.

    Arguments and errors as for `make_results`; the manifest is written, too.
    """
    files = manifest["files"]
    if not are_wanted(config) or (RESULTS in files and folder.has_intact(RESULTS, files[RESULTS]["sha256"])):
        return
    if RESULTS in files:
        observer.message(f"{folder.path / RESULTS} is not what the run had written; it is written again")
    files[RESULTS] = make_results(config, folder, source, manifest, files)
    folder.write_manifest(manifest)
